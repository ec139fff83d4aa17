"""``python -m oasiskv.demo.engine``: one row of the demo, in a process of its own.

Reads a :class:`Job` as one line of JSON from standard input. Writes events to standard output, one line of JSON each:
``{"progress": {...}}`` after every step and ``{"outcome": {...}}`` at the end. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from oasiskv.demo.documents import Prompt, build_prompts, is_right
from oasiskv.demo.plan import CHUNK, Job
from oasiskv.demo.probe import Outcome, Probe, Sample, summarise
from oasiskv.models.data import essays


def main() -> None:
    """Run the job on standard input."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    # The engine runs in this process: it can be looked into between steps, and uses every core (vLLM's own worker
    # process leaves one of them to the scheduler, which on two cores is half the machine).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    send(outcome=run(Job.from_json(sys.stdin.readline()), send).as_dict())


def run(job: Job, send: Any) -> Outcome:
    """Load the engine, answer all prompts at once, and measure every step."""
    began = time.perf_counter()
    counters = Counters()
    engine = load(job, counters)
    prompts = build_prompts(encoder(engine), essays(), job.prompt_tokens, job.facts)
    probe = Probe(engine.engine_core.engine_core)
    load_seconds = time.perf_counter() - began
    texts, samples = answer(engine, prompts, job.output_tokens, probe, counters, send)
    return summarise(
        samples,
        row=job.row,
        block_size=probe.block_size,
        pool_blocks=probe.pool_blocks,
        load_seconds=load_seconds,
        preemptions=counters.preemptions,
        right=sum(is_right(texts[p.city], p.number) for p in prompts),
        answers=tuple(texts[p.city] for p in prompts),
        states=counters.most,
    )


def load(job: Job, counters: Counters) -> Any:
    """vLLM's engine for ``job``."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    import oasiskv

    args = EngineArgs(
        model=job.model,
        max_model_len=job.prompt_tokens + job.output_tokens,
        kv_cache_memory_bytes=job.kv_bytes,
        max_num_batched_tokens=CHUNK,
        enforce_eager=True,  # compiling takes a minute, and gains 5 % at this size
    )
    if job.block_size is not None:
        args.block_size = job.block_size
    if job.settings is not None:
        args.kv_transfer_config = KVTransferConfig(**oasiskv.engine_args(**job.settings)["kv_transfer_config"])
    return LLMEngine.from_engine_args(args, stat_loggers=[lambda config, index: counters])


def encoder(engine: Any) -> Any:
    """Text to token ids."""
    tokenizer = engine.get_tokenizer()
    tokenizer.model_max_length = 1 << 30  # the essays are longer than any context; only pieces of them are used
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def answer(
    engine: Any, prompts: list[Prompt], output_tokens: int, probe: Probe, counters: Counters, send: Any
) -> tuple[dict[str, str], list[Sample]]:
    """Answer all prompts, which arrive together. Returns the texts by city, and a sample of every step."""
    from vllm import SamplingParams

    for prompt in prompts:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        engine.add_request(prompt.city, {"prompt_token_ids": prompt.ids}, params)
    texts: dict[str, str] = {}
    lengths: dict[str, int] = {}
    samples: list[Sample] = []
    while engine.has_unfinished_requests():
        began, fetched = time.perf_counter(), counters.fetched
        outputs = engine.step()
        seconds = time.perf_counter() - began
        done = sum(lengths.values())
        for output in outputs:
            texts[output.request_id] = output.outputs[0].text
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        new_tokens = sum(lengths.values()) - done
        running = probe.running()
        samples.append(
            Sample(seconds, running, probe.prefilled(), new_tokens, probe.blocks(), counters.fetched - fetched)
        )
        send(
            progress={
                "prompt_tokens": sum(s.prefilled for s in samples),
                "output_tokens": sum(lengths.values()),
                "running": running,
            }
        )
    return texts, samples


class Counters:
    """A stat logger of vLLM's (its interface is ``StatLoggerBase``) that adds up what the table needs."""

    def __init__(self) -> None:
        self.fetched = 0
        self.preemptions = 0
        self.most: dict[str, int] = {}

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take in one step."""
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        stats = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        self.fetched += stats.get("bytes_fetched", 0)
        for name in ("bounded_requests", "in_place_requests", "dense_requests"):
            if name in stats:
                self.most[name] = max(self.most.get(name, 0), stats[name])

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""


if __name__ == "__main__":
    main()
