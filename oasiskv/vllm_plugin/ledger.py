"""The scheduler's book: in which state each admitted request is, what of it is on the host, and what to do next.

One :class:`Record` per admitted request. The block manager reads and moves the states; the connector's scheduler half
fills in the facts (arrivals, acknowledgements, pressure) and turns the book into each step's metadata. Nothing here
knows what the pages contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from oasiskv.core.geometry import Geometry, blocks_for
from oasiskv.core.settings import Settings
from oasiskv.vllm_plugin.metadata import CopyOut, RequestStep, State
from oasiskv.vllm_plugin.switch import BUDGET

IN_PLACE_PAYS = 2.0
"""`auto` goes in_place from this multiple of the budget on: below, choosing costs as much as it saves."""


@dataclass
class Record:
    """One admitted request.

    ``committed``: tokens whose KV is computed and kept. ``dense_tokens``: how many of them were computed densely
    (None: all so far). ``host``: reserved host blocks, one per logical block. ``queued`` of them were named in a
    step's metadata, ``durable`` are acknowledged by every rank; both count blocks from the start. ``chosen``: under
    `auto`, this request is to give up its middle because device blocks run short.
    """

    request: Request
    geometry: Geometry
    state: State = State.DENSE
    committed: int = 0
    dense_tokens: int | None = None
    first_window: int = 0
    hot: list[KVCacheBlock] = field(default_factory=list)
    hot_holds: list[int] = field(default_factory=list)
    hot_sent: bool = True
    host: list[KVCacheBlock] = field(default_factory=list)
    queued: int = 0
    durable: int = 0
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    chosen: bool = False

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""
        return self.request.request_id

    @property
    def prefill_end(self) -> int:
        """Tokens after which the request decodes (a resumed one replays its own output first)."""
        return max(self.request.num_prompt_tokens, self.request.num_tokens - 1)


class Ledger:
    """Book of one engine.

    ``host_pool`` hands out host blocks; one is all layers and heads of a block. Its block 0 is vLLM's null block, so
    that pool block ``i`` is row ``i - 1`` of the workers' arenas.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        host_pool: BlockPool | None,
        max_model_len: int,
        lookahead: int = 0,
    ) -> None:
        self.settings = settings
        self.geometry = geometry
        self.host_pool = host_pool
        self.max_model_len = max_model_len
        self.lookahead = lookahead
        self.records: dict[str, Record] = {}
        self._dropped: list[str] = []
        self._released: list[tuple[int, int]] = []
        self._announced: set[str] = set()
        self.acknowledged_blocks = 0

    # -- arrivals and departures

    @property
    def only_if_it_frees(self) -> bool:
        """Under `auto`, a request is bounded only where that frees device blocks."""
        return self.settings.residency == "auto"

    def host_blocks_for(self, request: Request) -> int:
        """Host blocks that the request may need in its life; 0 if it can never become bounded."""
        if self.host_pool is None or self.settings.residency in ("dense", "in_place") or request.resumable:
            return 0
        longest = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        geometry = self.geometry_for(request)
        if not self._outgrows(geometry, longest):
            return 0
        return blocks_for(longest, self.geometry.block_size)

    def geometry_for(self, request: Request) -> Geometry:
        """The server's cut, or the request's own (``extra_args={"oasis_budget_tokens": n}``), up to the server's."""
        asked = budget_of(request)
        if asked is None or asked >= self.settings.budget_tokens:
            return self.geometry
        return Geometry.of(self.settings, self.geometry.block_size, asked)

    def has_host_room(self, request: Request) -> bool:
        """Whether the request's host blocks can be reserved now."""
        need = self.host_blocks_for(request)
        return need == 0 or (self.host_pool is not None and self.host_pool.get_num_free_blocks() >= need)

    def admit(self, request: Request) -> None:
        """A request got its first slots: open its record and reserve its host blocks if there is room.

        A session whose input streams in comes here once per turn; it stays dense.
        """
        if request.request_id in self.records:
            return
        record = Record(request, self.geometry_for(request))
        need = self.host_blocks_for(request)
        if need and self.has_host_room(request):
            assert self.host_pool is not None
            record.host = self.host_pool.get_new_blocks(need)
        self.records[request.request_id] = record

    def forget(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Close a record. Returns its hot slots; the tail blocks go to the workers, which finish their summaries."""
        record = self.records.pop(request_id, None)
        if record is None:
            return []
        size = self.geometry.block_size
        committed = record.request.num_computed_tokens
        first = max(0, committed // size - 1 - blocks_for(self.lookahead, size))
        for i, block in enumerate(blocks[first:], start=first):
            if not block.is_null:
                self._released.append((block.block_id, min(max(committed - i * size, 0), size)))
        if record.host:
            assert self.host_pool is not None
            self.host_pool.free_blocks(reversed(record.host))
        if request_id in self._announced:
            self._announced.discard(request_id)
            self._dropped.append(request_id)
        hot, record.hot = record.hot, []
        return hot

    def take_departures(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Requests that the workers must forget, and their tail blocks, since the last call."""
        dropped, released = self._dropped, self._released
        self._dropped, self._released = [], []
        return dropped, released

    # -- states

    def wants_bounded(self, record: Record) -> bool:
        """Whether the request's middle should leave the device now, and may."""
        if self.settings.residency not in ("bounded", "auto") or not record.host:
            return False
        if self.settings.residency == "auto" and not record.chosen:
            return False
        return record.durable >= record.first_window and self._outgrows(record.geometry, record.committed)

    def wants_sparse(self, record: Record, committed: int) -> bool:
        """Whether the request should choose its first set, its context being ``committed`` tokens after this step."""
        residency = self.settings.residency
        if residency == "dense" or record.request.resumable or not self._outgrows(record.geometry, committed):
            return False
        if residency == "auto":
            pays = committed >= IN_PLACE_PAYS * record.geometry.bound * record.geometry.block_size
            return pays or record.chosen
        return residency == "in_place" or bool(record.host)

    def relieve(self, need: int, own_middle: Callable[[Record], int]) -> None:
        """Device blocks run short by ``need``: under `auto`, choose the requests that free most until it is met.

        ``own_middle`` counts the middle blocks of a request that it shares with no one: only those are freed.
        """
        if self.settings.residency != "auto":
            return
        gains = []
        for record in self.records.values():
            if record.state == State.BOUNDED:
                continue
            committed = record.request.num_computed_tokens
            if not record.host or committed < record.prefill_end or not self._outgrows(record.geometry, committed):
                continue
            gain = own_middle(record) - record.geometry.hot
            if gain > 0:
                if record.chosen:
                    need -= gain
                else:
                    gains.append((gain, record))
        for gain, record in sorted(gains, key=lambda pair: -pair[0]):
            if need <= 0:
                return
            record.chosen = True
            need -= gain

    def awaits_copies(self) -> bool:
        """Whether a request will free blocks once copies that are on their way are acknowledged."""
        return any(
            record.in_flight and record.state != State.BOUNDED and (record.chosen or not self.only_if_it_frees)
            for record in self.records.values()
        )

    def _outgrows(self, geometry: Geometry, committed: int) -> bool:
        """Whether a context of ``committed`` tokens has more middle blocks than hot slots (and is not kept dense)."""
        least = self.settings.min_context_tokens
        return geometry.middle(committed) > geometry.hot and (least == "auto" or committed >= least)

    # -- one step

    def step_of(
        self, record: Record, scheduled: int, draft_tokens: Sequence[int], blocks: Sequence[KVCacheBlock]
    ) -> RequestStep | None:
        """What the workers need to know of a request that runs ``scheduled`` tokens in this step; None if it is
        dense."""
        drafts = len(draft_tokens)
        computed = record.request.num_computed_tokens
        if record.state == State.DENSE:
            certain = computed + scheduled - drafts
            if certain < record.prefill_end or not self.wants_sparse(record, certain):
                return None
            record.state = State.SEEDED
            record.first_window = record.geometry.first_window(certain)
        geometry = record.geometry
        self._announced.add(record.request_id)
        sends_hot = record.state == State.BOUNDED and not record.hot_sent
        record.hot_sent = True
        own = (computed + scheduled - drafts - 1) // geometry.block_size
        return RequestStep(
            state=record.state,
            tail=tuple(b.block_id for b in blocks[own:]),
            first_window=record.first_window,
            hot_count=geometry.hot,
            hot=tuple(b.block_id for b in record.hot) if sends_hot else (),
            hot_holds=tuple(record.hot_holds) if sends_hot else (),
            budget_blocks=geometry.bound,
            drafts=drafts,
            real_drafts=sum(token >= 0 for token in draft_tokens),
        )

    def copy_of(
        self, record: Record, scheduled: int, drafts: int, blocks: Sequence[KVCacheBlock], step: int
    ) -> CopyOut | None:
        """Blocks of the request that are full and certain once this step has run, and not yet queued for copying."""
        if not record.host:
            return None
        computed = record.request.num_computed_tokens
        certain = computed + scheduled - drafts if scheduled > drafts else computed
        full = min(certain // self.geometry.block_size, len(record.host))
        if full <= record.queued:
            return None
        self._announced.add(record.request_id)
        first, record.queued = record.queued, full
        record.in_flight.append((step, full))
        copied = range(first, full)
        return CopyOut(
            first=first,
            device=tuple(blocks[i].block_id for i in copied),
            host=tuple(record.host[i].block_id - 1 for i in copied),
        )

    def acknowledge(self, step: int) -> None:
        """Every rank holds the copies of all steps up to ``step``."""
        for record in self.records.values():
            while record.in_flight and record.in_flight[0][0] <= step:
                durable = record.in_flight.pop(0)[1]
                self.acknowledged_blocks += durable - record.durable
                record.durable = durable

    # -- checks

    def counts(self) -> dict[State, int]:
        """Admitted requests by state."""
        counts = dict.fromkeys(State, 0)
        for record in self.records.values():
            counts[record.state] += 1
        return counts

    def host_used(self) -> int:
        """Host blocks reserved."""
        return sum(len(r.host) for r in self.records.values())

    def check_integrity(self, blocks_of: dict[str, list[KVCacheBlock]]) -> None:
        """Invariants 1, 2, 4, 5 of the design, over all records.

        Raises:
            AssertionError: which request breaks which rule.
        """
        hot_ids: set[int] = set()
        for record in self.records.values():
            name, geometry = record.request_id, record.geometry
            held = [b for b in blocks_of.get(name, []) if not b.is_null]
            if record.state != State.BOUNDED:
                assert not record.hot, f"{name}: hot slots in state {record.state.name}"
                continue
            allowed = geometry.bound + blocks_for(geometry.block_size + self.lookahead, geometry.block_size)
            assert len(held) + len(record.hot) <= allowed, (
                f"{name}: holds {len(held)} + {len(record.hot)} hot blocks, allowed are {allowed}"
            )
            assert len(record.hot) == geometry.hot, f"{name}: {len(record.hot)} hot slots instead of {geometry.hot}"
            assert record.durable >= record.first_window, f"{name}: freed blocks without a durable copy"
            for block in record.hot:
                private = block.ref_cnt == 1 and block.block_hash is None
                assert private, f"{name}: hot block {block.block_id} is not private"
                assert block.block_id not in hot_ids, f"hot block {block.block_id} has two owners"
                hot_ids.add(block.block_id)
            assert not hot_ids & {b.block_id for b in held}, f"{name}: a block is both hot and in the table"


def budget_of(request: Request) -> int | None:
    """The request's own budget in tokens; it was checked when the request was submitted."""
    params = request.sampling_params
    value = ((params.extra_args if params is not None else None) or {}).get(BUDGET)
    return value if isinstance(value, int) else None
