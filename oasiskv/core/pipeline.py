"""The background pipeline: one job per layer, from the layer's queries of this step to its swap plans for the next.

A job is a pure function of what it was given; it never touches the residency map or the pages. The main thread takes
its result when the layer runs again, and commits it. At most one job of a layer is in flight.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch
from threadpoolctl import threadpool_limits

Result = TypeVar("Result")


class Pipeline(Protocol[Result]):
    """Runs jobs, keyed by layer. ``busy_seconds``: how long jobs have run, all together."""

    is_async: bool
    """Whether a job may still run when :meth:`submit` has returned."""
    busy_seconds: float

    def submit(self, layer: int, job: Callable[[], Result]) -> None:
        """Hand in the layer's job; its last one must have been taken."""

    def busy(self, layer: int) -> bool:
        """Whether a job of this layer has been handed in and not been taken."""

    def take(self, layer: int, wait: bool = False) -> Result | None:
        """The result of the layer's job; None if there is none, or it is late and ``wait`` is off."""

    def close(self) -> None:
        """Stop; results not taken are lost. May be called twice."""


class InlinePipeline(Generic[Result]):
    """Runs each job at once, on the caller's thread."""

    is_async = False

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._done: dict[int, Result] = {}

    def submit(self, layer: int, job: Callable[[], Result]) -> None:
        """Run ``job`` now."""
        assert layer not in self._done, f"layer {layer}: its last job was not taken"
        began = time.perf_counter()
        self._done[layer] = job()
        self.busy_seconds += time.perf_counter() - began

    def busy(self, layer: int) -> bool:
        """Whether a result waits to be taken."""
        return layer in self._done

    def take(self, layer: int, wait: bool = False) -> Result | None:
        """The result; never late."""
        return self._done.pop(layer, None)

    def close(self) -> None:
        """Nothing to stop."""
        self._done.clear()


class AsyncPipeline(Generic[Result]):
    """Runs jobs in order on one background thread with one core, beside the forward pass."""

    is_async = True

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="oasiskv-pipeline", initializer=_use_one_core)
        self._jobs: dict[int, Future[Result]] = {}

    def submit(self, layer: int, job: Callable[[], Result]) -> None:
        """Queue ``job``."""
        assert layer not in self._jobs, f"layer {layer}: its last job was not taken"
        self._jobs[layer] = self._pool.submit(self._timed, job)

    def _timed(self, job: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        try:
            return job()
        finally:
            self.busy_seconds += time.perf_counter() - began  # the pool has one thread: nobody else adds

    def busy(self, layer: int) -> bool:
        """Whether a job is queued, runs, or waits to be taken."""
        return layer in self._jobs

    def take(self, layer: int, wait: bool = False) -> Result | None:
        """The result, if it is there (or ``wait``). An error in the job is raised here."""
        job = self._jobs.get(layer)
        if job is None or not (wait or job.done()):
            return None
        del self._jobs[layer]
        return job.result()

    def close(self) -> None:
        """Cancel what has not begun, wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._jobs.clear()


def _use_one_core() -> None:
    """Keep this thread's torch operations off the cores of the forward pass; other threads keep theirs."""
    torch.get_num_threads()  # torch sets a thread's count at its first use: let it, before it is lowered
    threadpool_limits(1, user_api="openmp")


def free_core() -> bool:
    """Whether this process may use a core that torch's own threads leave free."""
    return len(os.sched_getaffinity(0)) > torch.get_num_threads()


def make_pipeline(mode: str) -> Pipeline:
    """``inline``, ``async``, or ``auto``: async where a core is free for it."""
    if mode == "auto":
        mode = "async" if free_core() else "inline"
    return AsyncPipeline() if mode == "async" else InlinePipeline()
