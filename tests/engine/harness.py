"""Engines in this process, one after another, with every invariant checked at every step.

with engine(tiny_llama, budget_tokens=256, residency="bounded") as e:
    tokens = e.generate([prompt(600), prompt(700)], max_tokens=60)
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny import VOCABULARY

import oasiskv

ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 2048,
    "num_gpu_blocks_override": 300,
    "block_size": 32,
    "max_num_batched_tokens": 1024,
    "disable_log_stats": True,
    "seed": 0,
}
OASIS: dict[str, Any] = {"residency": "bounded", "budget_tokens": 256, "pipeline": "inline", "scorer": "box"}
"""1 sink, 5 hot and 2 window blocks of 32 tokens; and the scorer that scores in every step, so that more happens."""
FIRST_WORD = 4
"""Tokens below are special."""


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random words: hardly any n-gram comes twice."""
    words = random.Random(seed)
    return [words.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]


def refrain(length: int, seed: int = 0, period: int = 24) -> list[int]:
    """The same ``period`` words again and again, so that n-gram drafts are made and some accepted."""
    return (prompt(period, seed) * (length // period + 1))[:length]


class Engine:
    """A vLLM engine in this process, whose scheduler and worker can be looked at between the steps."""

    def __init__(self, llm: Any) -> None:
        from oasiskv.vllm_plugin.backend_cpu import active_worker

        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.half = getattr(self.scheduler.connector, "scheduler", None)
        self.worker = active_worker()
        self.counts: Counter[str] = Counter()
        """What OasisKV counted since the engine started."""
        self.preempted: list[tuple[str, str]] = []
        """Requests that vLLM preempted, each with its state at that moment."""
        self.drafted = self.accepted = 0
        """Draft tokens that were verified, and those of them that the target model agreed with."""
        self.hits = 0
        """Tokens that finished requests took from vLLM's prefix cache."""
        self.steps = 0
        self._next_id = 0
        self._watch_preemptions()
        self._watch_drafts()
        if self.worker is not None:
            self._watch_counts(self.half)
            self._watch_counts(self.worker)

    def _watch_preemptions(self) -> None:
        original = self.scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            record = self.half.ledger.records.get(request.request_id) if self.half else None
            self.preempted.append((request.request_id, record.state.name if record else "STOCK"))
            original(request, *args, **kwargs)

        self.scheduler._preempt_request = preempt

    def _watch_drafts(self) -> None:
        original = self.scheduler.make_spec_decoding_stats

        def stats(*args: Any, num_draft_tokens: int, num_accepted_tokens: int, **kwargs: Any) -> Any:
            self.drafted += num_draft_tokens
            self.accepted += num_accepted_tokens
            return original(*args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **kwargs)

        self.scheduler.make_spec_decoding_stats = stats

    def _watch_counts(self, half: Any) -> None:
        from oasiskv.vllm_plugin.metrics import COUNTERS

        original = half.take_stats

        def take_stats() -> Any:
            stats = original()
            if stats is not None:
                self.counts.update({name: n for name, n in stats.data.items() if name in COUNTERS})
            return stats

        half.take_stats = take_stats

    # -- requests

    def submit(self, tokens: Sequence[int], max_tokens: int, name: str | None = None, **sampling: Any) -> str:
        """Add a request; greedy and of exactly ``max_tokens`` tokens unless told otherwise."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if name is None:
            name, self._next_id = str(self._next_id), self._next_id + 1
        settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | sampling
        settings["output_kind"] = RequestOutputKind.FINAL_ONLY
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(tokens)}, SamplingParams(**settings))
        return name

    def step(self) -> list[Any]:
        """One engine step and the scheduler's invariants. Returns the requests that finished in it."""
        outputs = self.llm.llm_engine.step()
        self.steps += 1
        if self.half is not None:
            self.half.check_integrity()
        finished = [output for output in outputs if output.finished]
        self.hits += sum(output.num_cached_tokens or 0 for output in finished)
        return finished

    def run(self) -> dict[str, list[list[int]]]:
        """Step until all requests have finished, then check the worker too. Tokens of each request's samples."""
        tokens = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.step():
                tokens[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
        self.check_worker()
        return tokens

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any) -> list[list[list[int]]]:
        """Submit all prompts at once and run. Tokens of each prompt's samples."""
        names = [self.submit(tokens, max_tokens, **sampling) for tokens in prompts]
        done = self.run()
        return [done[name] for name in names]

    def verify(self, record_choices: bool = False) -> Any:
        """Compare every attention row from now on with the masked reference. Returns the report, which fills up."""
        from verifier import Verifier

        self.worker.observer = Verifier(self.worker, record_choices)
        return self.worker.observer.report

    def abort(self, name: str) -> None:
        """Abort a request as a client that hangs up does."""
        self.llm.llm_engine.abort_request([name])

    def preempt(self, request: Any) -> None:
        """Have the scheduler take a running request's blocks away, as it does when blocks run short."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())

    def request_id(self, name: str) -> str:
        """vLLM's own name for a request that runs."""
        (found,) = [r for r in self.scheduler.requests if r == name or r.rsplit("-", 1)[0] == name]
        return found

    # -- what must hold

    def check_worker(self) -> None:
        """The worker's invariants. Swaps that are on the way are entered, as its next step would."""
        import torch

        if self.worker is not None:
            with torch.inference_mode():
                self.worker.check_integrity()

    def blocks_of(self, request_id: str) -> list[int]:
        """Device blocks that a request holds now, hot slots included."""
        record = self.half.ledger.records[request_id]
        table = self.half.manager.req_to_blocks[request_id]
        return [b.block_id for b in (*table, *record.hot) if not b.is_null]

    def assert_empty(self) -> None:
        """Nothing of any request is left in a pool, map or queue.

        The workers hear of a departure with the next step, so one short request is run first; its own departure is
        then the only thing that they have not heard of.
        """
        self.generate([[FIRST_WORD] * 3], max_tokens=1)
        half, worker = self.half, self.worker
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler.requests
        assert not half.manager.req_to_blocks
        assert half.ledger.records == {} and half.ledger._announced == set() and half.ledger.host_used() == 0
        assert half._tried == {}
        free = self.pool.get_num_free_blocks()
        assert free == self.pool.num_gpu_blocks - 1, f"{self.pool.num_gpu_blocks - 1 - free} device blocks are lost"
        assert half.ledger.parked == {} and half.ledger.resuming == set() and half._local == {}
        if half.ledger.index is not None:
            free = half.ledger.index.pool.get_num_free_blocks()
            assert free == half.layout.host_blocks, f"{half.layout.host_blocks - free} host blocks are lost"
        assert worker.held == {} and worker.host_blocks == {} and worker._born == {} and worker.map.held == 0
        assert not any(worker.pipeline.busy(layer) for layer in range(len(worker.pages)))
        dropped, released = half.ledger.take_departures()
        assert dropped == [] and len(released) == 1
        for book in worker.books:
            book.blocks.finish(released)
            assert book.blocks.staged_blocks == 0
        self.check_worker()

    def close(self) -> None:
        """Shut the engine down and check that its threads have ended."""
        self.llm.llm_engine.engine_core.shutdown()
        left = [t.name for t in threading.enumerate() if t.name.startswith("oasiskv")]
        assert not left, f"threads left: {left}"


@contextmanager
def engine(
    model: Path, *, stock: bool = False, vllm: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Engine]:
    """An engine of ``model`` with OasisKV's ``settings`` on top of ``OASIS``, or ``stock``: without OasisKV."""
    arguments = ENGINE | {"model": str(model)} | (vllm or {})
    if not stock:
        arguments |= oasiskv.engine_args(**(OASIS | settings))
    with _heap_at_rest():
        running = Engine(_build(arguments))
        try:
            yield running
            if not stock:
                running.assert_empty()
        finally:
            running.close()


def _build(arguments: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    from oasiskv.vllm_plugin.workarounds import let_engines_follow_numba

    let_engines_follow_numba()  # stock engines too: tests of the scorers may have used numba before
    try:
        return LLM(**arguments)
    except BaseException:  # a refused engine leaves process groups behind, in which the next one would find itself
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        raise


_at_rest = False


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """Keep vLLM from freezing, thawing and searching the whole heap with every engine, which takes 2 seconds each.

    The modules are frozen once; what an engine leaves is still collected after it.
    """
    global _at_rest
    import vllm.entrypoints.llm  # noqa: F401

    if not _at_rest:
        gc.collect()
        gc.freeze()
        _at_rest = True
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze
        gc.collect()
