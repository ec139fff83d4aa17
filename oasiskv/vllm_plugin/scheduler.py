"""The connector's scheduler half: gathers the facts of a step, turns the ledger into the workers' metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from oasiskv.core.geometry import blocks_for
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.vllm_plugin.host_index import HostIndex
from oasiskv.vllm_plugin.layout import Layout
from oasiskv.vllm_plugin.ledger import Ledger, Record
from oasiskv.vllm_plugin.manager import OasisManager
from oasiskv.vllm_plugin.metadata import State, StepMetadata
from oasiskv.vllm_plugin.metrics import OasisStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

PATIENCE = 4
"""Steps that a request which cannot grow waits for acknowledgements before vLLM may preempt."""


class SchedulerHalf:
    """Lives in the scheduler process. Owns the :class:`Ledger`; the block manager shares it."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings, layout: Layout) -> None:
        speculative = vllm_config.speculative_config
        self.lookahead = speculative.num_speculative_tokens if speculative is not None else 0
        self.settings = settings
        self.layout = layout
        index = HostIndex(layout.host_blocks, layout.geometry.block_size) if layout.host_blocks else None
        self.ledger = Ledger(
            settings, layout.geometry, index, vllm_config.model_config.max_model_len, self.lookahead, layout.whole
        )
        self.manager: OasisManager
        self.step = 0
        self._tried: dict[str, Request] = {}
        self._local: dict[str, int] = {}
        self._loads: list[tuple[int, int]] = []
        self._resumes: list[tuple[str, int]] = []
        self._restored = 0
        self._hashes: object = None
        self._host_is_full = False
        self._stalled_at = -1
        self._stalls = 0
        self._acknowledged = 0
        self._sparse_steps = 0

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Join with the block manager and take the summaries' share out of the pool.

        Raises:
            SettingsError: the pool is too small for the summaries and one request.
        """
        managers = [m for m in kv_cache_manager.coordinator.single_type_managers if isinstance(m, OasisManager)]
        if len(managers) != 1:
            raise SettingsError(
                f"OasisKV: {len(managers)} block managers own the full-attention layers; allowed is exactly 1; is the "
                "oasiskv package installed in the engine's environment, and VLLM_PLUGINS unset or naming oasiskv?"
            )
        self.manager = managers[0]
        self.manager.ledger = self.ledger
        pool = self.manager.block_pool
        reserved = self.layout.reserved_blocks
        for block in pool.blocks[len(pool.blocks) - reserved :]:  # none, where the summaries lie elsewhere
            pool.free_block_queue.remove(block)
            block.ref_cnt = 1
        pool.num_gpu_blocks -= reserved
        longest = blocks_for(self.ledger.max_model_len, self.layout.geometry.block_size)
        if pool.get_num_free_blocks() < longest:
            raise SettingsError(
                f"OasisKV: the device pool of {len(pool.blocks)} blocks keeps {pool.get_num_free_blocks()} after "
                f"{reserved} for summaries; one request of max_model_len={self.ledger.max_model_len} needs {longest}; "
                "give vLLM more KV memory or lower --max-model-len"
            )
        logger.info(
            "OasisKV: residency=%s, %d blocks of %d tokens per bounded request (%d sink, %d hot, %d window), "
            "device pool %d blocks of which %d hold summaries, host pool %d blocks",
            self.settings.residency,
            self.layout.geometry.bound,
            self.layout.geometry.block_size,
            self.layout.geometry.sinks,
            self.layout.geometry.hot,
            self.layout.geometry.window,
            len(pool.blocks),
            reserved,
            self.layout.host_blocks,
        )

    def may_start(self, request: Request, local_tokens: int) -> int | None:
        """How many tokens beyond the ``local_tokens`` on the device the host tier has of a waiting request.

        None: it may not be tried before the host pool has room for it.
        """
        self._tried[request.request_id] = request
        self._follow_reset()
        if self._stalled_at == self.step:  # the blocks just freed are for the running request that waits for them
            return None
        parked = self.ledger.parked.get(request.request_id)
        if parked is not None:
            if parked.committed > local_tokens:
                return parked.committed - local_tokens
            self.ledger.unpark(request.request_id)
        needs_host = self.settings.residency == "bounded" and self.ledger.host_blocks_for(request) > 0
        if needs_host and (self._host_is_full or not self.ledger.has_host_room(request)):
            self._host_is_full = True  # nobody who came later overtakes
            return None
        self._local[request.request_id] = local_tokens
        size = self.layout.geometry.block_size
        found, exact = self.ledger.find_prefix(request)
        if len(found) > exact:
            self.ledger.exact_tokens[request.request_id] = exact * size
        return max(0, len(found) * size - local_tokens)

    def started(self, request: Request, device: Sequence[int], host_tokens: int) -> None:
        """A waiting request got the device blocks ``device``; ``host_tokens`` of its prefix are to be loaded there."""
        record = self.ledger.records.get(request.request_id)
        if record is not None:
            if record.request_id in self.ledger.resuming:
                self._resumed(record, device)
            self.ledger.wake(record)  # a session whose input streams in comes here once per turn
            return
        size = self.layout.geometry.block_size
        first = self._local.pop(request.request_id, 0) // size
        last = first + host_tokens // size
        found = self.ledger.admit(request, restored=last)
        self._loads += [(found[i].block_id - 1, device[i]) for i in range(first, last)]
        self._restored += last - first

    def _resumed(self, record: Record, device: Sequence[int]) -> None:
        self.ledger.resuming.discard(record.request_id)
        geometry, size = record.geometry, self.layout.geometry.block_size
        there = [*range(geometry.sinks), *range(record.first_window, blocks_for(record.committed, size))]
        self._loads += [(record.host[i].block_id - 1, device[i]) for i in there]
        if record.committed % size:  # its last block goes on filling: its copy does not count yet
            self._resumes.append((record.request_id, device[there[-1]]))
            record.spare.append(record.host.pop())
            record.told = record.durable = len(record.host)

    def _follow_reset(self) -> None:
        """vLLM's prefix cache was reset (the weights changed, say): the host tier forgets too."""
        hashes = self.manager.block_pool.cached_block_hash_to_block
        if self._hashes is not hashes:
            if self._hashes is not None:
                self.forget()
            self._hashes = hashes

    def forget(self) -> None:
        """Nothing in the host tier may be found any more."""
        if self.ledger.index is not None:
            self.ledger.index.forget()
        for request_id in list(self.ledger.parked):
            self.ledger.unpark(request_id)

    def frees_are_near(self) -> bool:
        """A running request cannot grow. Bound who can be bounded now; else wait for copies, but not for long.

        Returns:
            Whether the request should try again in the next step, before vLLM preempts anyone.
        """
        if self._stalled_at != self.step:
            self._stalls = self._stalls + 1 if self._stalled_at == self.step - 1 else 1
            self._stalled_at = self.step
        self.ledger.relieve(1, self.manager.own_middle)
        if self.manager.bound_ready():
            return True
        return self.ledger.awaits_copies() and self._stalls <= PATIENCE

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers do in this step."""
        self.step += 1
        metadata = StepMetadata(step=self.step)
        metadata.dropped, metadata.released = self.ledger.take_departures()
        metadata.loads, self._loads = self._loads, []
        metadata.resumes, self._resumes = self._resumes, []
        metadata.parks = self.ledger.take_parks()
        agenda = self.ledger.agenda
        for record in agenda.take(self.step):
            request_id = record.request_id
            scheduled = output.num_scheduled_tokens.get(request_id)
            if scheduled is None:
                agenda.soon(record)
                continue
            blocks = self.manager.req_to_blocks[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            if drafts:
                newest = (record.request.num_computed_tokens + scheduled - 1) // self.layout.geometry.block_size
                metadata.drafts[blocks[newest].block_id] = len(drafts)
            entry = self.ledger.step_of(record, scheduled, drafts, blocks)
            if entry is not None:
                metadata.requests[request_id] = entry
            copy = self.ledger.copy_of(record, scheduled, len(drafts), blocks, self.step)
            if copy is not None:
                metadata.copies[request_id] = copy
            self.ledger.rest(record, scheduled, entry is None, self.step)
        self._relieve(output)
        states = self.ledger.states
        self._sparse_steps += bool(states[State.IN_PLACE] or states[State.BOUNDED])
        return metadata

    def _relieve(self, output: SchedulerOutput) -> None:
        """Under `auto`: does anyone wait for device blocks, or will someone soon?"""
        free = self.manager.block_pool.get_num_free_blocks()
        size = self.layout.geometry.block_size
        growth = len(self.ledger.records) * blocks_for(1 + self.lookahead, size) + 1
        need = growth - free
        for request_id, request in self._tried.items():
            if request_id not in output.num_scheduled_tokens:
                need = max(need, blocks_for(request.num_tokens, size) + growth - free)
        self._tried.clear()
        self._local.clear()
        self.ledger.exact_tokens.clear()
        self._host_is_full = False
        if need > 0:
            self.ledger.relieve(need, self.manager.own_middle)
        self.ledger.follow_majority(self.manager.own_middle)

    def take_stats(self) -> OasisStats:
        """Gauges of this moment, and the blocks acknowledged since the last call."""
        states = self.ledger.states
        acknowledged = self.ledger.acknowledged_blocks - self._acknowledged
        self._acknowledged = self.ledger.acknowledged_blocks
        counts = {
            "acknowledged_blocks": acknowledged,
            "restored_blocks": self._restored,
            "sparse_steps": self._sparse_steps,
            "resumed_requests": self.ledger.resumed,
            "recomputed_requests": self.ledger.recomputed,
        }
        self._restored = self.ledger.resumed = self.ledger.recomputed = 0
        self._sparse_steps = 0
        levels = {
            "bounded_requests": states[State.BOUNDED],
            "in_place_requests": states[State.IN_PLACE],
            "dense_requests": states[State.DENSE] + states[State.SEEDED],
            "host_blocks_used": self.ledger.host_used(),
            "host_blocks_total": self.layout.host_blocks,
        }
        return OasisStats(data={**counts, **levels})  # made in every step

    def check_integrity(self) -> None:
        """All invariants that the scheduler process can see."""
        self.ledger.check_integrity(dict(self.manager.req_to_blocks))
