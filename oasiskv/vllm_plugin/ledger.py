"""The scheduler's book: in which state each admitted request is, what of it is on the host, and what to do next.

One :class:`Record` per admitted request. The block manager reads and moves the states; the connector's scheduler half
fills in the facts (arrivals, acknowledgements, pressure) and turns the book into each step's metadata. Nothing here
knows what the pages contain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from oasiskv.core.geometry import Geometry, blocks_for
from oasiskv.core.settings import Settings
from oasiskv.vllm_plugin.agenda import NEVER, Agenda
from oasiskv.vllm_plugin.host_index import APPROXIMATE, EXACT, HostIndex
from oasiskv.vllm_plugin.metadata import CopyOut, Park, RequestStep, State
from oasiskv.vllm_plugin.switch import BUDGET

IN_PLACE_PAYS = 2.0
"""`auto` goes in_place from this multiple of the budget on: below, choosing costs as much as it saves."""


@dataclass
class Record:
    """One admitted request.

    ``committed``: tokens whose KV is computed and kept. ``dense_tokens``: how many of them were computed densely
    (None: all so far). ``host``: host blocks of the logical blocks from 0 on, perhaps shared with others; ``spare``:
    reserved for those to come. The workers know the first ``told`` of them; ``durable`` are acknowledged by every rank.
    ``chosen``: under `auto`, this request is to give up its middle because device blocks run short.

    Most steps change nothing for most requests, and must cost next to nothing: before its context has ``moves_at``
    tokens the block manager has nothing to do for it, before the step ``due`` there is nothing to tell the workers.
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
    spare: list[KVCacheBlock] = field(default_factory=list)
    told: int = 0
    durable: int = 0
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    chosen: bool = False
    moves_at: int = 0
    due: int = NEVER

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""
        return self.request.request_id

    @property
    def has_host(self) -> bool:
        """Whether host blocks are reserved for its whole life."""
        return bool(self.host or self.spare)

    def is_approximate(self, block: int) -> bool:
        """Whether the logical block was computed, at least in part, by a sparse step."""
        return self.dense_tokens is not None and (block + 1) * self.geometry.block_size > self.dense_tokens

    @property
    def prefill_end(self) -> int:
        """Tokens after which the request decodes (a resumed one replays its own output first)."""
        return max(self.request.num_prompt_tokens, self.request.num_tokens - 1)


class Ledger:
    """Book of one engine. ``index`` knows the host blocks; None without a host pool."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        index: HostIndex | None,
        max_model_len: int,
        lookahead: int = 0,
        restores: bool = True,
    ) -> None:
        """``restores``: what the host tier keeps is enough to go on from (the model has no other kind of KV)."""
        self.settings = settings
        self.geometry = geometry
        self.index = index
        self.max_model_len = max_model_len
        self.restores = restores
        self.lookahead = lookahead
        self.records: dict[str, Record] = {}
        self.states: Counter[State] = Counter()
        """Admitted requests by state."""
        self.agenda: Agenda[Record] = Agenda()
        """Records about which the workers may have to be told something."""
        self.parked: dict[str, Record] = {}
        """Bounded requests that were preempted: their host blocks are kept, and they go on from them."""
        self.resuming: set[str] = set()
        self.exact_tokens: dict[str, int] = {}
        """Waiting requests whose prefix comes from the host with approximate blocks: tokens before the first of them.
        vLLM caches what it will load before the request has a record."""
        self._parks: list[Park] = []
        self.resumed = 0
        self.recomputed = 0
        self._dropped: list[str] = []
        self._released: list[tuple[int, int]] = []
        self._announced: set[str] = set()
        self._copying: dict[str, Record] = {}
        """Records with copies in flight."""
        self.acknowledged_blocks = 0
        self._followed = (0, 0)
        """Bounded requests and those in place, when it was last looked whether the latter should follow."""

    # -- arrivals and departures

    @property
    def only_if_it_frees(self) -> bool:
        """Under `auto`, a request is bounded only where that frees device blocks."""
        return self.settings.residency == "auto"

    def host_blocks_for(self, request: Request) -> int:
        """Host blocks that the request may need in its life; 0 if it can never become bounded."""
        if self.index is None or self.settings.residency in ("dense", "in_place") or request.resumable:
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
        return need == 0 or (self.index is not None and self.index.has_room(need, self.find_prefix(request)[0]))

    def find_prefix(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Host blocks that hold the beginning of a waiting request, one token short of all; and how many are exact."""
        if self.index is None or not self.restores:
            return [], 0
        limit = (request.num_tokens - 1) // self.geometry.block_size
        will_be_bounded = self.settings.residency == "bounded" and self.host_blocks_for(request) > 0
        return self.index.prefix(request, limit, will_be_bounded and self.settings.reuse_approximate)

    def admit(self, request: Request, restored: int) -> list[KVCacheBlock]:
        """A request got its first slots: open its record and reserve its host blocks if there is room.

        Args:
            restored: blocks of its prefix that are on the device, by hits there and loads from here.

        Returns:
            The host blocks of that prefix that could be found.
        """
        self.exact_tokens.pop(request.request_id, None)
        record = Record(request, self.geometry_for(request))
        found, exact = self.find_prefix(request)
        found = found[: max(restored, exact)]  # an approximate copy is of use only to who computes on it
        if len(found) > exact:
            record.dense_tokens = exact * self.geometry.block_size
        need = self.host_blocks_for(request)
        if need and self.has_host_room(request):
            assert self.index is not None
            record.spare = self.index.reserve(need, found)
            record.host = list(found)
            record.durable = len(found)
        self._open(record)
        return found

    def _open(self, record: Record) -> None:
        self.records[record.request_id] = record
        self.states[record.state] += 1
        self.agenda.soon(record)

    def forget(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Close a record. Returns its hot slots; the tail blocks go to the workers, which finish their summaries."""
        record = self.records.pop(request_id, None)
        if record is None:
            self.unpark(request_id)
            return []
        self.agenda.drop(record)
        self.states[record.state] -= 1
        if record.request.status == RequestStatus.RUNNING:  # preempted
            if record.state == State.BOUNDED and self.restores:
                return self._park(record, blocks)
            self.recomputed += 1
        self._released += self._last_blocks(record, blocks)
        self._close(record)
        hot, record.hot = record.hot, []
        return hot

    def _last_blocks(self, record: Record, blocks: Sequence[KVCacheBlock]) -> list[tuple[int, int]]:
        """Device blocks whose summaries may be unfinished, with their committed tokens."""
        size, committed = self.geometry.block_size, record.request.num_computed_tokens
        first = max(0, committed // size - 1 - blocks_for(self.lookahead, size))
        last = [(block, i) for i, block in enumerate(blocks[first:], start=first) if not block.is_null]
        return [(block.block_id, min(max(committed - i * size, 0), size)) for block, i in last]

    def _close(self, record: Record) -> None:
        self._copying.pop(record.request_id, None)
        if self.index is not None:
            self.index.release(record.host)
            self.index.release(record.spare)
        if record.request_id in self._announced:
            self._announced.discard(record.request_id)
            self._dropped.append(record.request_id)

    # -- preemption

    def _park(self, record: Record, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """A bounded request is preempted: what is not on the host yet is copied before anyone writes to its blocks."""
        size = self.geometry.block_size
        record.committed = record.request.num_computed_tokens
        rescued = []
        for i in range(len(record.host), blocks_for(record.committed, size)):
            record.host.append(record.spare.pop())
            rescued.append((blocks[i].block_id, record.host[i].block_id - 1))
        record.told = record.durable = len(record.host)
        record.in_flight.clear()
        self._copying.pop(record.request_id, None)
        tail = blocks[record.committed // size].block_id if record.committed % size else -1
        host = tuple(block.block_id - 1 for block in record.host)
        released = tuple(self._last_blocks(record, blocks))
        self._parks.append(Park(record.request_id, released, tail, tuple(rescued), host))
        self.parked[record.request_id] = record
        hot, record.hot = record.hot, []
        return hot

    def unpark(self, request_id: str) -> None:
        """A preempted request will not go on from the host (it was aborted, or the cache was reset)."""
        record = self.parked.pop(request_id, None)
        if record is not None:
            self._close(record)

    def resume(self, record: Record) -> None:
        """A parked request has its device blocks back."""
        del self.parked[record.request_id]
        assert record.state == State.BOUNDED
        self._open(record)
        record.first_window = record.geometry.first_window(record.committed)
        record.hot_holds = [-1] * record.geometry.hot
        record.hot_sent = False
        record.moves_at = 0
        self.resumed += 1
        self.resuming.add(record.request_id)

    def take_parks(self) -> list[Park]:
        """Requests that were parked since the last call."""
        parks, self._parks = self._parks, []
        return parks

    def take_departures(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Requests that the workers must forget, and their tail blocks, since the last call."""
        dropped, released = self._dropped, self._released
        self._dropped, self._released = [], []
        return dropped, released

    def cacheable(self, request: Request, num_tokens: int) -> int:
        """How many of a request's first ``num_tokens`` tokens may enter vLLM's prefix cache: those computed densely."""
        record = self.records.get(request.request_id)
        if record is None:
            return min(num_tokens, self.exact_tokens.get(request.request_id, num_tokens))
        return num_tokens if record.dense_tokens is None else min(num_tokens, record.dense_tokens)

    # -- states

    def enter(self, record: Record, state: State) -> None:
        """The request's KV lives elsewhere from now on; the workers are told in the next step."""
        self.states[record.state] -= 1
        self.states[state] += 1
        record.state = state
        self.agenda.soon(record)

    def wake(self, record: Record) -> None:
        """Something about the record changed between its blocks: look at it in the next step."""
        record.moves_at = 0
        self.agenda.soon(record)

    def wants_bounded(self, record: Record) -> bool:
        """Whether the request's middle should leave the device now, and may."""
        if self.settings.residency not in ("bounded", "auto") or not record.has_host:
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
        return residency == "in_place" or record.has_host

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
            if not record.has_host or committed < record.prefill_end or not self._outgrows(record.geometry, committed):
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
            self.wake(record)
            need -= gain

    def follow_majority(self, own_middle: Callable[[Record], int]) -> None:
        """Under `auto`, where most sparse requests are bounded: choose those in place too.

        Beside bounded ones, whose rows share dense requests' kernel call, a few in place cost every layer a call of
        their own. ``own_middle`` as for :meth:`relieve`.
        """
        counts = self.states[State.BOUNDED], self.states[State.IN_PLACE]
        if counts == self._followed or self.settings.residency != "auto":
            return
        self._followed = counts
        bounded, in_place = counts
        if not 0 < in_place < bounded:
            return
        for record in self.records.values():
            waits = record.state == State.IN_PLACE and record.has_host and not record.chosen
            if waits and own_middle(record) > record.geometry.hot:
                record.chosen = True
                self.wake(record)

    def awaits_copies(self) -> bool:
        """Whether a request will free blocks once copies that are on their way are acknowledged."""
        return any(
            record.state != State.BOUNDED and (record.chosen or not self.only_if_it_frees)
            for record in self._copying.values()
        )

    def _outgrows(self, geometry: Geometry, committed: int) -> bool:
        """Whether a context of ``committed`` tokens has more middle blocks than hot slots (and is not kept dense)."""
        least = self.settings.min_context_tokens
        return geometry.middle(committed) > geometry.hot and (least == "auto" or committed >= least)

    # -- one step

    def step_of(
        self, record: Record, scheduled: int, draft_tokens: Sequence[int], blocks: Sequence[KVCacheBlock]
    ) -> RequestStep | None:
        """What the workers need to know of a request that runs ``scheduled`` tokens in this step, and in those after it
        in which it is not due; None if it is dense."""
        drafts = len(draft_tokens)
        computed = record.request.num_computed_tokens
        if record.state == State.DENSE:
            certain = computed + scheduled - drafts
            if certain < record.prefill_end or not self.wants_sparse(record, certain):
                return None
            self.enter(record, State.SEEDED)
            record.moves_at = 0
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

    def rest(self, record: Record, scheduled: int, is_dense: bool, step: int) -> None:
        """A request was looked at in ``step``, in which it runs ``scheduled`` tokens: when to do so again, if one token
        follows another. A block that begins or fills up is a reason; with drafts, whose number differs, each step."""
        size, least = self.geometry.block_size, self.settings.min_context_tokens
        total = record.request.num_computed_tokens + scheduled
        begins, fills = ((total - 1) // size + 1) * size, (total // size + 1) * size - 1
        changes = min(begins, fills)
        if self.lookahead or total < record.prefill_end:
            changes = total
        elif is_dense and least != "auto" and total < least:
            changes = min(changes, least - 1)
        self.agenda.at(record, step + 1 + max(0, changes - total))

    def copy_of(
        self, record: Record, scheduled: int, drafts: int, blocks: Sequence[KVCacheBlock], step: int
    ) -> CopyOut | None:
        """Host blocks of the request that the workers do not know yet: the full, certain blocks once this step has run.

        A block whose exact copy is in the index already is shared, not copied again.
        """
        if not record.has_host:
            return None
        assert self.index is not None
        computed = record.request.num_computed_tokens
        certain = computed + scheduled - drafts if scheduled > drafts else computed
        device: dict[int, int] = {}
        while record.spare and len(record.host) < certain // self.geometry.block_size:
            i = len(record.host)
            approximate = record.is_approximate(i)
            shared = None if approximate else self.index.find(record.request, i)
            if shared is not None:
                self.index.share(shared)
                record.host.append(shared)
                self.index.release([record.spare.pop()])
            else:
                record.host.append(record.spare.pop())
                self.index.publish(record.request, record.host, i, APPROXIMATE if approximate else EXACT, step)
                device[i] = blocks[i].block_id
        if record.told == len(record.host):
            return None
        self._announced.add(record.request_id)
        first, record.told = record.told, len(record.host)
        if record.durable < record.told:
            record.in_flight.append((step, record.told))
            self._copying[record.request_id] = record
        span = range(first, record.told)
        return CopyOut(
            first=first,
            device=tuple(device.get(i, -1) for i in span),
            host=tuple(record.host[i].block_id - 1 for i in span),
        )

    def acknowledge(self, step: int) -> None:
        """Every rank holds the copies of all steps up to ``step``."""
        if self.index is not None:
            self.index.acknowledge(step)
        for record in list(self._copying.values()):
            while record.in_flight and record.in_flight[0][0] <= step:
                durable = record.in_flight.pop(0)[1]
                self.acknowledged_blocks += durable - record.durable
                record.durable = durable
                record.moves_at = 0
            if not record.in_flight:
                del self._copying[record.request_id]

    # -- checks

    def host_used(self) -> int:
        """Host blocks that requests hold."""
        return self.index.used if self.index is not None else 0

    def check_integrity(self, blocks_of: dict[str, list[KVCacheBlock]]) -> None:
        """Invariants 1, 2, 4, 5 of the design, over all records.

        Raises:
            AssertionError: which request breaks which rule.
        """
        counted = Counter(record.state for record in self.records.values())
        assert +self.states == counted, f"states {self.states} of records in {counted}"
        hot_ids: set[int] = set()
        for record in self.records.values():
            name, geometry = record.request_id, record.geometry
            held = [b for b in blocks_of.get(name, []) if not b.is_null]
            if record.state != State.BOUNDED:
                assert not record.hot, f"{name}: hot slots in state {record.state.name}"
                continue
            allowed = geometry.bound + blocks_for(geometry.block_size + self.lookahead, geometry.block_size)
            waiting = max(0, geometry.first_window(record.committed) - record.first_window)  # for acknowledgements
            assert len(held) + len(record.hot) <= allowed + waiting, (
                f"{name}: holds {len(held)} + {len(record.hot)} hot blocks, allowed are {allowed} + {waiting}"
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
