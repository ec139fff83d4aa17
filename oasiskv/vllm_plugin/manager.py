"""The block manager of full-attention groups: vLLM's own, plus what makes a request bounded.

``req_to_blocks`` stays position-indexed: sinks, then null blocks where the middle has left, then window and tail. Hot
slots are private blocks, kept aside in the ledger's records and given back together with the rest.

The manager frees and keeps; when, the :class:`Ledger` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from oasiskv.core.geometry import blocks_for
from oasiskv.vllm_plugin.ledger import Ledger, Record
from oasiskv.vllm_plugin.metadata import State


class OasisManager(FullAttentionManager):
    """Owns the number of device blocks of every request with full-attention layers.

    Without a bound ledger (or for requests that it does not know) it behaves exactly as its base.
    """

    ledger: Ledger | None = None

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Called for every request that is about to get slots: move its state on, free what has left."""
        record = self.ledger.records.get(request_id) if self.ledger else None
        if record is None:
            return
        if processed_computed_tokens < record.moves_at:
            record.committed = processed_computed_tokens
            return
        if record.request.is_finished():
            return
        assert self.ledger is not None
        record.committed = processed_computed_tokens
        record.moves_at = (processed_computed_tokens // self.block_size + 1) * self.block_size
        if record.state in (State.SEEDED, State.IN_PLACE):
            self._leave_dense(record)
            if self.ledger.wants_bounded(record):
                self._bound(record)
                if not record.hot:  # no room now
                    record.moves_at = 0
        elif record.state == State.BOUNDED:
            self._move_window(record)

    # -- a preempted request that goes on from its host blocks gets its bounded footprint, and nothing else

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Device blocks that a request needs to get slots for ``num_tokens``."""
        if request_id in self.num_cached_block:  # it has slots: what the base would say, after more questions
            return max(0, -(-num_tokens // self.block_size) - len(self.req_to_blocks[request_id]))
        record = self._parked(request_id)
        if record is None:
            return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        geometry = record.geometry
        beyond = blocks_for(num_tokens, self.block_size) - geometry.first_window(record.committed)
        return geometry.sinks + geometry.hot + beyond

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> None:
        """Blocks that vLLM's prefix cache still has are left there."""
        if self._parked(request_id) is None:
            super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Sinks, hot slots, window and tail; null blocks where the middle is."""
        record = self._parked(request_id)
        if record is None:
            super().allocate_external_computed_blocks(request_id, *args, **kwargs)
            return
        assert self.ledger is not None
        self.ledger.resume(record)
        geometry, pool, blocks = record.geometry, self.block_pool, self.req_to_blocks[request_id]
        total = blocks_for(record.committed, self.block_size)
        blocks += pool.get_new_blocks(geometry.sinks)
        blocks += [self._null_block] * (record.first_window - geometry.sinks)
        blocks += pool.get_new_blocks(total - record.first_window)
        record.hot = pool.get_new_blocks(geometry.hot)
        self.num_cached_block[request_id] = total

    def _parked(self, request_id: str) -> Record | None:
        return self.ledger.parked.get(request_id) if self.ledger is not None else None

    def own_middle(self, record: Record) -> int:
        """Middle blocks of a request that nobody else shares: what bounding it could free, and its hot slots."""
        blocks = self.req_to_blocks[record.request_id]
        geometry = record.geometry
        middle = blocks[geometry.sinks : geometry.first_window(record.request.num_computed_tokens)]
        return sum(block.ref_cnt == 1 for block in middle)

    def bound_ready(self) -> bool:
        """Bound every request that is ready for it, without waiting for its turn. Whether any was."""
        assert self.ledger is not None
        before = self.block_pool.get_num_free_blocks()
        for record in self.ledger.records.values():
            if record.state in (State.SEEDED, State.IN_PLACE) and self.ledger.wants_bounded(record):
                self._leave_dense(record)
                self._bound(record)
        return self.block_pool.get_num_free_blocks() > before

    def _leave_dense(self, record: Record) -> None:
        assert self.ledger is not None
        if record.state == State.SEEDED:
            self.ledger.enter(record, State.IN_PLACE)
            if record.dense_tokens is None:
                record.dense_tokens = record.committed
        window = record.geometry.first_window(record.committed)
        if window > record.first_window:
            record.first_window = window
            self.ledger.agenda.soon(record)

    def _bound(self, record: Record) -> None:
        """Free the middle; ``H`` blocks of it, taken out of the prefix cache, become the hot slots.

        A middle that is shared with many stays where it is, and the request reads it in place: their hot slots together
        would take more blocks than they free.
        """
        assert self.ledger is not None
        geometry = record.geometry
        blocks = self.req_to_blocks[record.request_id]
        middle = range(geometry.sinks, record.first_window)
        own = [i for i in middle if blocks[i].ref_cnt == 1]
        hot = own[-geometry.hot :]
        fresh = geometry.hot - len(hot)
        if fresh:
            share = sum(1 / blocks[i].ref_cnt for i in middle)
            pays = share > geometry.hot and not self.ledger.only_if_it_frees
            if not pays or fresh > self.block_pool.get_num_free_blocks():
                return
        if len(own) <= len(hot) and self.ledger.only_if_it_frees:
            return
        if self.enable_caching:
            self.block_pool.evict_blocks({blocks[i].block_id for i in hot})
        record.hot = [blocks[i] for i in hot]
        record.hot_holds = hot + [-1] * fresh
        for i in hot:
            blocks[i] = self._null_block
        self._free(blocks, middle)
        if fresh:
            record.hot += self.block_pool.get_new_blocks(fresh)
        self.ledger.enter(record, State.BOUNDED)
        record.hot_sent = False

    def _move_window(self, record: Record) -> None:
        assert self.ledger is not None
        window = record.geometry.first_window(record.committed)
        window = min(window, record.durable)
        if window > record.first_window:
            self._free(self.req_to_blocks[record.request_id], range(record.first_window, window))
            record.first_window = window
            self.ledger.agenda.soon(record)

    def _free(self, blocks: list[KVCacheBlock], positions: range) -> None:
        freed = []
        for i in reversed(positions):
            if blocks[i] is not self._null_block:
                freed.append(blocks[i])
                blocks[i] = self._null_block
        self.block_pool.free_blocks(freed)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Only blocks that were computed densely enter vLLM's prefix cache."""
        if self.ledger is not None:
            num_tokens = self.ledger.cacheable(request, num_tokens)
        if self.num_cached_block.get(request.request_id, 0) >= num_tokens // self.block_size:
            return  # as in nearly every step: the base would say the same, after more questions
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """A request leaves (finished, aborted or preempted): its hot slots go with it."""
        blocks = super().pop_blocks_for_free(request_id)
        if self.ledger is not None:
            blocks = blocks + self.ledger.forget(request_id, blocks)
        return blocks
