"""``oasiskv generate MODEL --prompt TEXT``: one offline answer, to try things out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import oasiskv
from oasiskv.cli.options import UsageError, print_settings_help, split, split_model
from oasiskv.installed import check_vllm
from oasiskv.models import resolve_model

USAGE = "oasiskv generate MODEL --prompt TEXT [--max-tokens N] [--raw] [settings] [any engine option of vLLM]"
NOTES = (
    "--prompt TEXT    may be given more than once; `-` reads it from standard input",
    "--max-tokens N   tokens to generate at most (256)",
    "--temperature T  0 is greedy (0)",
    "--raw            continue the text as it is, without the model's chat template",
)


@dataclass(frozen=True)
class Request:
    """What is asked for, before anything heavy starts."""

    model: str
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    raw: bool
    settings: dict[str, str]
    vllm: tuple[str, ...]
    """Engine options that are vLLM's."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse(arguments: Sequence[str]) -> Request:
    """Check the command line.

    Raises:
        SettingsError, UsageError: something is wrong with it.
    """
    settings, rest = split(arguments)
    oasiskv.engine_args(**settings)
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--raw", action="store_true")
    ours, rest = parser.parse_known_args(rest)
    model, rest = split_model(rest, "generate")
    if not ours.prompt:
        raise UsageError("no prompt given: add --prompt 'your text', or --prompt - to read it from standard input")
    return Request(
        model=model,
        prompts=tuple(ours.prompt),
        max_tokens=ours.max_tokens,
        temperature=ours.temperature,
        raw=ours.raw,
        settings=settings,
        vllm=tuple(rest),
    )


def run(arguments: Sequence[str]) -> None:
    """Run the command and print one answer for each prompt."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print_settings_help(USAGE, notes=NOTES)
        return
    check_vllm()
    request = parse(arguments)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in request.prompts]
    model = resolve_model(request.model)

    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the answers
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="oasiskv generate"))
    engine = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *request.vllm]))
    engine.kv_transfer_config = KVTransferConfig(**oasiskv.engine_args(**request.settings)["kv_transfer_config"])
    llm = LLM.from_engine_args(engine)
    sampling = SamplingParams(max_tokens=request.max_tokens, temperature=request.temperature)
    if request.raw or llm.get_tokenizer().chat_template is None:  # type: ignore[union-attr]
        answers = llm.generate(prompts, sampling)
    else:
        answers = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
    for answer in answers:
        print(answer.outputs[0].text)
