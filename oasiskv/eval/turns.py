"""How soon the next turn of a long chat starts, its history gone from the device.

``python -m oasiskv.eval.turns``: for each of several chats, the first turn (its history is prefilled), another chat
that pushes it off the device, and the second turn (history, answer and a new question); the time to the first token of
both turns, side by side, with OasisKV's host tier and with vLLM alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from oasiskv.models import resolve_model
from oasiskv.models.data import essays

ANSWER_TOKENS = 48
QUESTION_TOKENS = 32
BLOCK = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    args = parser().parse_args(arguments)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    table = Table("engine", "turn one, s", "turn two, s", "turn two / turn one")
    for name, is_on in (("OasisKV", True), ("vLLM alone", False)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:  # one engine each
            turns = process.submit(measure, args.model, args.history, args.chats, is_on).result()
        ratios = [second / first for first, second in turns]
        table.add_row(name, *map(spread, (*zip(*turns, strict=True), ratios)))
    table.title = f"{args.model}, history of {args.history:,} tokens, {args.chats} chats: median (least to most)"
    Console(width=max(100, Console().width)).print(table)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m oasiskv.eval.turns", description=(__doc__ or "").split("\n\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    found.add_argument("--model", default="smollm2", help="name or folder of a model")
    found.add_argument("--history", type=int, default=6000, help="tokens before the first question")
    found.add_argument("--chats", type=int, default=4, help="how often both turns are measured")
    return found


def spread(seconds: Sequence[float]) -> str:
    """Median and extremes."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def measure(model: str, history: int, chats: int, is_on: bool) -> list[tuple[float, float]]:
    """Seconds to the first token of both turns of each chat."""
    from vllm import LLM

    import oasiskv

    longest = history + 2 * (ANSWER_TOKENS + QUESTION_TOKENS) + 2 * BLOCK
    settings: dict[str, Any] = oasiskv.engine_args(residency="bounded", host_gib="auto") if is_on else {}
    llm = LLM(
        resolve_model(model),
        max_model_len=longest,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        block_size=BLOCK,
        num_gpu_blocks_override=longest // BLOCK * 5 // 4,  # the second of two chats pushes out the first
        **settings,
    )
    tokens = llm.get_tokenizer().encode(essays(), add_special_tokens=False)
    need = history + 2 * QUESTION_TOKENS
    if len(tokens) < (chats + 2) * need:
        raise ValueError(f"--chats {chats} of {need} tokens need {(chats + 2) * need}; the text has {len(tokens)}")
    texts = [tokens[i * need : (i + 1) * need] for i in range(chats + 2)]
    _turn(llm, texts[-1][:history])  # warms up
    seconds = []
    for i in range(chats):
        question, again = texts[i][history : history + QUESTION_TOKENS], texts[i][history + QUESTION_TOKENS :]
        first, answer = _turn(llm, texts[i][:history] + question)
        _turn(llm, texts[-2][:history])
        second, _ = _turn(llm, texts[i][:history] + question + answer + again)
        seconds.append((first, second))
    return seconds


def _turn(llm: Any, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens of the answer."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    engine.add_request(f"turn-{began}", {"prompt_token_ids": prompt}, params)
    first, answer = 0.0, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = list(output.outputs[0].token_ids)
            first = first or time.perf_counter() - began
    return first, answer


if __name__ == "__main__":
    raise SystemExit(main())
