"""Engines that stay loaded from one round to the next: loading takes longer than most rounds."""

from __future__ import annotations

import psutil
import torch
from rich.console import Console

from oasiskv.bench.cells import GIB
from oasiskv.bench.job import Job, Run
from oasiskv.bench.process import EngineProcess

ENGINE_BYTES = 3 * GIB
"""Memory of an engine beside its pools: a small model's weights, activations, the libraries."""


class EnginePool:
    """Runs jobs, each in an engine of its own kind, one job at a time.

    Engines stay for later jobs of the same :attr:`Job.engine_key` as long as host memory holds them beside a new one;
    the one used longest ago goes first. On an accelerator, whose memory one engine fills, none stays.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open: dict[str, EngineProcess] = {}

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            for engine in self._open.values():
                engine.kill()
            self._open.clear()

    def run(self, job: Job, title: str) -> Run:
        """Run ``job`` to its end.

        Raises:
            RunFailed: an engine could not start or broke off, or did not end well when it had to make room.
        """
        key = job.engine_key
        engine = self._open.pop(key, None)
        if engine is None:
            self._make_room(job)
            engine = EngineProcess(job, title)
        try:
            found = engine.run(job, title, self._console)
        except BaseException:
            engine.kill()
            raise
        self._open[key] = engine
        if torch.accelerator.is_available():
            self.close()
        return found

    def close(self) -> None:
        """End all engines.

        Raises:
            RunFailed: one of them did not end well.
        """
        while self._open:
            self._close_oldest()

    def _make_room(self, job: Job) -> None:
        need = job.kv_bytes + int((job.settings or {}).get("host_gib", 0) * GIB) + ENGINE_BYTES
        while self._open and psutil.virtual_memory().available < need:
            self._close_oldest()

    def _close_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).close()
