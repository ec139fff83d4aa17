r"""``python -m oasiskv.bench.engine``: one engine, in a process of its own.

Reads :class:`Job`\ s from standard input, one line of JSON each, until that ends. The first one says what engine to
load; the others ask the same engine more, which has forgotten all KV by then. Writes events to standard output, one
line of JSON each: ``{"progress": {...}}`` now and then and ``{"run": {...}}`` at the end of a job. What vLLM prints
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from oasiskv.bench.drive import Observed, Progress, drive
from oasiskv.bench.job import Conversation, Job, Run, Sample, Turn
from oasiskv.bench.probe import Probe, Stopwatch

WARM_UP_OUTPUT = 8
"""Tokens of the request that goes before all others, so that little is measured that happens only once."""
SECONDS_BETWEEN_EVENTS = 0.2


def main() -> None:
    """Run the jobs on standard input."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    # The engine runs in this process: it can be looked into between steps, and uses every core (vLLM's own worker
    # process leaves one of them to the scheduler, which on two cores is half the machine).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    engine = None
    for line in sys.stdin:
        job = Job.from_json(line)
        if engine is None:
            engine = Engine(job)
        send(run=run(engine, job, send).as_dict())


def run(engine: Engine, job: Job, send: Callable[..., None]) -> Run:
    """Go through all conversations of a job and measure every step."""
    engine.forget()
    done, told = [0, 0], 0.0

    def on_step(samples: Sequence[Sample]) -> None:
        nonlocal told
        done[0] += samples[-1].prefilled
        done[1] += samples[-1].new_tokens
        if time.perf_counter() - told > SECONDS_BETWEEN_EVENTS or done[1] == job.output_tokens:
            told = time.perf_counter()
            send(progress={"prompt_tokens": done[0], "output_tokens": done[1], "running": samples[-1].running})

    samples, answers = drive(engine, job.conversations, job.concurrency, on_step)
    return Run(
        row=job.row,
        block_size=engine.probe.block_size,
        pool_blocks=engine.probe.pool_blocks,
        load_seconds=engine.load_seconds,
        preemptions=engine.counters.preemptions,
        samples=tuple(samples),
        answers=tuple(answers),
        states=engine.counters.most,
    )


class Engine:
    """vLLM's engine for a job, as :class:`oasiskv.bench.drive.Steppable`.

    ``load_seconds``: what loading it and a first, small request took.
    """

    def __init__(self, job: Job) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        began = time.perf_counter()
        self.counters = Counters()
        self._engine: Any = LLMEngine.from_engine_args(
            engine_args(job), stat_loggers=[lambda config, index: self.counters]
        )
        core = self._engine.engine_core.engine_core
        self.probe = Probe(core)
        self._scheduling = Stopwatch(core.scheduler, "schedule", "update_from_output")
        self._is_ours = job.settings is not None
        drive(self, [Conversation("warm-up", (Turn((1,) * job.warm_up, WARM_UP_OUTPUT),))], 1)
        self.load_seconds = time.perf_counter() - began

    def forget(self) -> None:
        """Start from nothing: no KV is kept of what was asked before, and nothing is counted yet.

        Raises:
            RuntimeError: vLLM would not let go of its prefix cache.
        """
        if not self._engine.reset_prefix_cache(reset_connector=self._is_ours):
            raise RuntimeError("vLLM did not reset its prefix cache: a block is still in use")
        self.counters.forget()
        self.probe.forget()
        self.observe()

    def add(self, name: str, tokens: Sequence[int], output: int) -> None:
        """Submit a request."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)

    def step(self) -> Sequence[Progress]:
        """One step of the engine."""
        outputs = self._engine.step()
        return [
            Progress(output.request_id, output.outputs[0].token_ids, output.finished, output.outputs[0].text)
            for output in outputs
        ]

    def observe(self) -> Observed:
        """What it holds and has done."""
        fetched, pipeline = self.counters.take()
        probe = self.probe
        return Observed(
            probe.running(),
            probe.prefilled(),
            probe.blocks(),
            fetched,
            pipeline,
            probe.shortest(),
            self._scheduling.take(),
        )


def engine_args(job: Job) -> Any:
    """vLLM's ``EngineArgs`` for a job."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import oasiskv

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="oasiskv bench"))
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", job.model, *job.options]))
    given = {o.split("=")[0].lstrip("-").replace("-", "_") for o in job.options if o.startswith("--")}
    for name, value in job.engine.items():
        if name not in given:
            setattr(args, name, value)
    args.max_model_len = job.max_model_len
    args.kv_cache_memory_bytes = job.kv_bytes
    if job.settings is not None:
        args.kv_transfer_config = KVTransferConfig(**oasiskv.engine_args(**job.settings)["kv_transfer_config"])
        if job.fill:
            from vllm.plugins import load_general_plugins

            load_general_plugins()  # ours registers its connector, which is then exchanged
            from oasiskv.vllm_plugin.filled import fill_prompts

            fill_prompts()
    elif job.fill:
        args.kv_transfer_config = KVTransferConfig(
            kv_connector="FillConnector", kv_role="kv_both", kv_connector_module_path="oasiskv.vllm_plugin.filled"
        )
    return args


class Counters:
    """A stat logger of vLLM's (its interface is ``StatLoggerBase``) that adds up what the figures need."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start from nothing."""
        self.preemptions = 0
        self.most: dict[str, int] = {}
        self._fetched = 0
        self._pipeline = 0.0

    def take(self) -> tuple[int, float]:
        """Bytes fetched and seconds of the pipeline since the last call."""
        found = self._fetched, self._pipeline
        self._fetched, self._pipeline = 0, 0.0
        return found

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take in one step."""
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        stats = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        self._fetched += stats.get("bytes_fetched", 0)
        self._pipeline += 1e-6 * stats.get("pipeline_microseconds", 0)
        for name in ("bounded_requests", "in_place_requests", "dense_requests"):
            if name in stats:
                self.most[name] = max(self.most.get(name, 0), stats[name])

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""


if __name__ == "__main__":
    main()
