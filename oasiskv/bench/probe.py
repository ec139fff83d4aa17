"""What an engine core that runs in this process holds between its steps, and how long its scheduler takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Adds up the seconds that some methods of one object take, whoever calls them. They must not call each other."""

    def __init__(self, owner: Any, *methods: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = 0.0
        for name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def take(self) -> float:
        """Seconds since the last call."""
        found, self._seconds = self._seconds, 0.0
        return found

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds += self._clock() - began

        return timed


class Probe:
    """Reads one engine core between its steps."""

    def __init__(self, core: Any) -> None:
        self.scheduler = core.scheduler
        cache = self.scheduler.kv_cache_manager
        managers = cache.coordinator.single_type_managers
        ours = [m for m in managers if getattr(m, "ledger", None) is not None]
        self.manager = (ours or list(managers))[0]
        self.pool_blocks = int(cache.block_pool.get_num_free_blocks())
        self.block_size = int(self.manager.block_size)
        self._computed: dict[str, int] = {}

    def forget(self) -> None:
        """Requests of the same names may come again."""
        self._computed.clear()

    def running(self) -> int:
        """Requests that run, as vLLM counts them: prompt or output under way."""
        return len(self.scheduler.running)

    def prefilled(self) -> int:
        """Prompt tokens computed since the last call (a preempted request starts over)."""
        new = 0
        for request in self.scheduler.running:
            now = min(request.num_computed_tokens, request.num_prompt_tokens)
            new += max(0, now - self._computed.get(request.request_id, 0))
            self._computed[request.request_id] = now
        for request in self.scheduler.waiting:
            self._computed[request.request_id] = request.num_computed_tokens
        return new

    def blocks(self) -> tuple[int, ...]:
        """Device blocks of each request whose prompt is done: real ids only, hot slots with them."""
        return tuple(self._held(request.request_id) for request in self._decoding())

    def shortest(self) -> int:
        """Tokens of the shortest context of a request whose prompt is done; 0 if there is none."""
        return min((int(request.num_tokens) for request in self._decoding()), default=0)

    def _decoding(self) -> list[Any]:
        return [r for r in self.scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens]

    def _held(self, request_id: str) -> int:
        ids = {block.block_id for block in self.manager.req_to_blocks[request_id] if not block.is_null}
        ledger = getattr(self.manager, "ledger", None)
        record = ledger.records.get(request_id) if ledger is not None else None
        if record is not None:
            ids |= {block.block_id for block in record.hot}
        return len(ids)
