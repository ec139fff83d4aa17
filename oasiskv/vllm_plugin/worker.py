"""The connector's worker half: what one rank holds, and what it does between and inside its attention layers.

Per step::

    begin_step   forget who left, take in new states, fill the hot slots of requests that become bounded
    each layer   commit the swaps that are ready | attention | hand the queries to the pipeline
    end_step     copy full, committed blocks out to the host arena
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from oasiskv.core.link_budget import pages_per_step
from oasiskv.core.merge import merge_heads
from oasiskv.core.page_scores import page_scores
from oasiskv.core.pipeline import Pipeline, make_pipeline
from oasiskv.core.residency import PageMoves, ResidencyMap
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.core.summaries import LayerSummaries, StagedTail, SummaryBook, SummaryWrites, Written
from oasiskv.core.swap_plan import EMPTY, SwapPlan, first_set, plan_swaps
from oasiskv.tiers.host import HostArena, as_pages
from oasiskv.vllm_plugin.direct_swaps import DirectSwaps
from oasiskv.vllm_plugin.layout import Layout, layer_scorer
from oasiskv.vllm_plugin.metadata import Park, RequestStep, State, StepMetadata
from oasiskv.vllm_plugin.metrics import OasisStats
from oasiskv.vllm_plugin.step import ScoreGroup, StepView
from oasiskv.vllm_plugin.workarounds import rewind_seeded_requests, sample_beside_drafts

logger = init_logger(__name__)


@dataclass
class Held:
    """One sparse request on this rank. ``row`` is its row in the residency map, ``born`` the step in which it got it.

    ``tail``: its device blocks from the newest token on. ``hot``: those of its hot slots (bounded only). ``stages``:
    the keys that its last block waits for, by book, while it is preempted.
    """

    request_id: str
    row: int
    born: int
    state: State
    first_window: int
    hot_count: int
    budget_blocks: int
    drafts: int = 0
    real_drafts: int = 0
    tail: tuple[int, ...] = ()
    hot: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    stages: list[StagedTail] = field(default_factory=list)


@dataclass
class Book:
    """The summaries of the layers that write the same tokens in the same pass; ``writes`` are those of this step."""

    blocks: SummaryBook
    layers: list[int]
    writes: SummaryWrites | None = None


@dataclass(frozen=True)
class Outcome:
    """What a pipeline job hands back for one score group: a first set, or a plan."""

    group: ScoreGroup
    blocks: Tensor | None = None
    plan: SwapPlan | None = None


class Worker:
    """State and actions of one rank.

    Threads: everything runs on the model runner's thread but the pipeline's jobs, which read only what they were
    given and the summaries of blocks that are not written any more.
    """

    def __init__(self, vllm_config: VllmConfig, settings: Settings, layout: Layout) -> None:
        sample_beside_drafts()
        rewind_seeded_requests()
        self.settings = settings
        self.layout = layout
        self.geometry = layout.geometry
        heads = {layer.shape.heads for layer in layout.layers if not layer.is_draft}
        if len(heads) != 1:
            raise SettingsError(
                f"OasisKV: layers have different numbers of KV heads ({sorted(heads)}); this model is not supported"
            )
        self.kv_heads = heads.pop()
        self.dtype = vllm_config.model_config.dtype
        self.index = {layer.name: i for i, layer in enumerate(layout.layers)}
        set_heads = self.kv_heads if settings.granularity == "head" else 1
        self.map = ResidencyMap(len(layout.layers), set_heads, self.geometry.hot)
        speculative = vllm_config.speculative_config
        lookahead = speculative.num_speculative_tokens if speculative is not None else 0
        self.books = [
            Book(SummaryBook(layout.device_blocks, self.geometry.block_size, lookahead + is_draft), layers)
            for is_draft in (False, True)
            if (layers := [i for i, layer in enumerate(layout.layers) if layer.is_draft == is_draft])
        ]
        """Of the target's layers, and of the drafter's, if it has some."""
        self.scorers = [layer_scorer(settings, layer.head_dim, self.dtype) for layer in layout.layers]
        self.arena = HostArena(layout.host_blocks, layout.shapes)
        self.pipeline: Pipeline[list[Outcome]] = make_pipeline(settings.pipeline)
        self.pages: list[Tensor] = []
        self.summaries: list[LayerSummaries] = []
        self.held: dict[str, Held] = {}
        self.host_blocks: dict[str, np.ndarray] = {}
        self.drafts: dict[int, int] = {}
        self.step = 0
        self.step_tokens = 0
        """Tokens of the target's forward pass."""
        self.copied_step = 0
        self.stats = OasisStats()
        self.observer: Callable[..., None] | None = None
        """Called after each attention with what it saw; for tests and measurements."""
        self._direct = DirectSwaps(self)
        self._born: dict[int, int] = {}
        self._owner: dict[int, Held] = {}
        self._seeding: set[int] = set()
        self._metadata: StepMetadata | None = None
        self._bandwidth: float | None = None
        self._step_seconds: float | None = None
        self._began = 0.0
        self._told_microseconds = 0

    # -- set-up

    def register(self, kv_caches: dict[str, Tensor]) -> None:
        """Take views of the device KV, and room for its blocks' summaries: the pool's last blocks, which the scheduler
        gives to no one, or memory of their own."""
        reserved = self.layout.reserved_blocks
        for layer, scorer in zip(self.layout.layers, self.scorers, strict=True):
            cache = kv_caches[layer.name]
            shape = layer.shape
            assert cache.is_contiguous() and cache.shape[0] == self.layout.device_blocks, layer.name
            self.pages.append(as_pages(cache, shape.page_bytes))
            memory = None
            if self.layout.summaries_in_pool:
                memory = cache[cache.shape[0] - reserved :].view(-1).view(torch.uint8).zero_()
                memory = memory[: cache.shape[0] * shape.summary_bytes]
            store = shape.store(cache.shape[0], memory)
            self.summaries.append(LayerSummaries(scorer, store, self.geometry.block_size, self.dtype))
        self.arena.join(self.pages, [layer.store for layer in self.summaries])
        if self.settings.fetch_cap == "auto" and self.layout.host_blocks:
            self._bandwidth = self._measure_bandwidth()

    def _measure_bandwidth(self) -> float:
        """Bytes per second of scattered page copies from the arena (one warm-up, then the best of three)."""
        count = min(64, self.layout.host_blocks, self.layout.device_blocks)
        host, device = torch.randperm(self.layout.host_blocks)[:count], torch.arange(count)
        self.arena.save(host, device)  # first touch; the device KV is still empty
        best = 0.0
        for _ in range(4):
            began = time.perf_counter()
            self.arena.load(0, host, None, self.pages[0], device)
            best = max(best, count * self.layout.shapes[0].block_bytes / (time.perf_counter() - began))
        return best

    # -- between the steps

    def begin_step(self, metadata: StepMetadata) -> None:
        """Take in what the scheduler decided for this step."""
        if self._metadata is metadata:
            return
        self._metadata = metadata
        self.step = metadata.step
        self._began = time.perf_counter()
        for book in self.books:
            book.writes = None
        for park in metadata.parks:
            self._park(park)
        for request_id in metadata.dropped:
            self._drop(request_id)
        if metadata.released:
            self._finish(metadata.released)
        self._restore(metadata.loads)
        for request_id, tail in metadata.resumes:
            held = self.held[request_id]
            for book, stage in zip(self.books, held.stages, strict=True):
                book.blocks.attach(stage, tail)
            held.stages = []
        for request_id, copy in metadata.copies.items():
            table = self.host_blocks.get(request_id, np.empty(0, dtype=np.int64))
            self.host_blocks[request_id] = np.concatenate((table[: copy.first], np.asarray(copy.host, dtype=np.int64)))
        self.drafts = metadata.drafts
        for request_id, entry in metadata.requests.items():
            self._take_in(request_id, entry)

    def _finish(self, released: Sequence[tuple[int, int]], keep: int = -1) -> None:
        for book in self.books:
            writes = book.blocks.finish(released, keep)
            for i in book.layers:
                self.summaries[i].apply(writes, None)

    def _park(self, park: Park) -> None:
        """A request is preempted: its blocks will be overwritten in this step's forward pass, not before."""
        self._settle_pipeline()
        self._finish(park.released, park.tail)
        held = self.held[park.request_id]
        self._own(held, ())
        self.host_blocks[park.request_id] = np.asarray(park.host, dtype=np.int64)
        if park.rescued:
            device, host = torch.tensor(park.rescued).unbind(1)
            self.arena.save(host, device)
        if park.tail >= 0:
            held.stages = [book.blocks.detach(park.tail) for book in self.books]

    def _restore(self, loads: list[tuple[int, int]]) -> None:
        """Read host blocks back to the device, with their summaries."""
        if not loads:
            return
        host, device = torch.tensor(loads).unbind(1)
        self.arena.restore(host, device)
        for book in self.books:
            book.blocks.restore(device.tolist())

    def _take_in(self, request_id: str, entry: RequestStep) -> None:
        held = self.held.get(request_id)
        if held is None:
            held = Held(
                request_id=request_id,
                row=self.map.allocate(entry.hot_count),
                born=self.step,
                state=entry.state,
                first_window=entry.first_window,
                hot_count=entry.hot_count,
                budget_blocks=entry.budget_blocks,
            )
            self.held[request_id] = held
            self._born[held.row] = held.born
        held.state, held.first_window = entry.state, entry.first_window
        held.drafts, held.real_drafts = entry.drafts, entry.real_drafts
        if entry.hot:
            held.hot = np.asarray(entry.hot, dtype=np.int32)
            self._fill_hot_slots(held, torch.tensor(entry.hot_holds))
        self._own(held, entry.tail)

    def _own(self, held: Held, tail: tuple[int, ...]) -> None:
        """From now on the request's last blocks are ``tail``."""
        for block in held.tail:
            if self._owner.get(block) is held:
                del self._owner[block]
        held.tail = tail
        for block in tail:
            self._owner[block] = held

    def _drop(self, request_id: str) -> None:
        self.host_blocks.pop(request_id, None)
        held = self.held.pop(request_id, None)
        if held is not None:
            self._own(held, ())
            self.map.release(held.row)
            for book, stage in zip(self.books, held.stages, strict=False):
                book.blocks.discard(stage)
            del self._born[held.row]

    def _fill_hot_slots(self, held: Held, holds: Tensor) -> None:
        """The request becomes bounded: bring its chosen set into its slots, which hold the blocks ``holds`` [H] so
        far."""
        hot = torch.from_numpy(held.hot).long()
        table = torch.from_numpy(self.host_blocks[held.request_id])
        self._settle_pipeline()
        for i in range(len(self.layout.layers)):
            if bool((self.map.block[i, held.row, :, : held.hot_count] == EMPTY).any()):  # a drafter that did not run
                newest = torch.arange(held.first_window - held.hot_count, held.first_window)
                self.map.seed(i, torch.tensor([held.row]), newest.expand(1, self.map.heads, -1), self.step)
        fetch = self.map.settle(held.row, holds)
        for i in range(len(self.layout.layers)):
            head, slot = fetch[i].nonzero(as_tuple=True)
            block = self.map.block[i, held.row, head, slot].long()
            self._load(i, table[block], head, hot[slot])

    def _settle_pipeline(self) -> None:
        for i in range(len(self.layout.layers)):
            self._commit(i, wait=True)

    def end_step(self) -> None:
        """Copy out what the scheduler asked for; the step's forward pass (and drafting) is over."""
        metadata = self._metadata
        if metadata is None or metadata.step == self.copied_step:
            return
        if metadata.copies:
            named = [pair for copy in metadata.copies.values() for pair in zip(copy.device, copy.host, strict=True)]
            pairs = torch.tensor([pair for pair in named if pair[0] >= 0], dtype=torch.int64).view(-1, 2)
            self.arena.save(pairs[:, 1], pairs[:, 0])
        self.copied_step = metadata.step
        if self._owner:
            took = time.perf_counter() - self._began
            self._step_seconds = took if self._step_seconds is None else 0.9 * self._step_seconds + 0.1 * took

    # -- inside the layers

    def owner_of(self, table: np.ndarray, seq_len: int) -> Held | None:
        """The sparse request whose row this is: the one that owns the block of the row's newest token."""
        return self._owner.get(int(table[(seq_len - 1) // self.geometry.block_size]))

    def writes_of(self, rows: Iterable[Written], of_drafter: bool) -> SummaryWrites:
        """What the layers do with the keys of this pass; the same for all of vLLM's attention groups."""
        book = self.books[of_drafter]
        if book.writes is None:
            book.writes = book.blocks.write(list(rows))
        return book.writes

    def cap_of(self, held: Held) -> int:
        """Most pages per KV head and step for this request."""
        share = self.settings.fetch_cap
        if share != "auto":
            return held.hot_count if share >= 1 else min(held.hot_count, max(1, round(share * held.budget_blocks)))
        if self._bandwidth is None or self._step_seconds is None:
            return max(1, round(0.05 * held.budget_blocks))
        shape = self.layout.layers[0].shape
        bounded = sum(h.state == State.BOUNDED for h in self.held.values())
        per_set = self.kv_heads // self.map.heads
        return pages_per_step(
            "auto",
            self.geometry,
            copy_bandwidth=self._bandwidth,
            step_seconds=self._step_seconds,
            page_bytes=per_set * shape.page_bytes,
            streams=max(1, bounded) * len(self.layout.layers) * self.map.heads,
        )

    def before_attention(self, layer: int, view: StepView, query: Tensor, scale: float) -> None:
        """Bring the layer's slots up to date: swaps that are ready; with `fetch`, also what this step's queries
        miss."""
        self._commit(layer)
        if self.settings.miss_policy == "fetch":
            groups = [g for g in view.groups if not g.seeds]
            if groups:
                self._commit(layer, wait=True)
                self._enter(layer, self._job(layer, groups, query, scale, uncapped=True)(), counts=True)

    def after_attention(self, layer: int, view: StepView, query: Tensor, scale: float) -> None:
        """Hand the layer's queries to the pipeline, unless its last job is still on the way."""
        if not view.groups:
            return
        seeds = any(g.seeds for g in view.groups)
        if not seeds and (self.step + layer) % self.settings.steps_between_scores:
            return  # another layer's turn
        if self.pipeline.busy(layer):
            if not seeds:
                return
            self._commit(layer, wait=True)
        if seeds:
            self._seeding.add(layer)
        elif not self.pipeline.is_async and self._direct.choose(layer, view.groups, query, scale):
            return
        self.pipeline.submit(layer, self._job(layer, view.groups, query, scale))

    def _job(
        self, layer: int, groups: list[ScoreGroup], query: Tensor, scale: float, uncapped: bool = False
    ) -> Callable[[], list[Outcome]]:
        """A pure function of the queries and the residency of this moment."""
        step, sinks, merge = self.step, self.geometry.sinks, self.settings.group_merge
        scorer, heads = self.scorers[layer], self.map.heads
        per_head = self.layout.layers[layer].shape.heads == heads
        inputs = [(g, self.map.of(layer, g.rows)) for g in groups]
        stores = (self.summaries[layer].store, self.arena.summaries[layer])
        refine = self.settings.refined_pages(self.map.hot, self.geometry.block_size)
        if self.pipeline.is_async:
            query = query.clone()  # the layer's buffer is used again while the job runs

        def run() -> list[Outcome]:
            outcomes = []
            for group, (resident, age, hot_of) in inputs:
                store = stores[group.on_host]
                scores = page_scores(scorer, query, store, group.candidates, scale, merge, refine)
                if not per_head:
                    scores = merge_heads(scores, merge).expand(-1, heads, -1)
                if group.seeds:
                    outcomes.append(Outcome(group, blocks=first_set(scores, group.hot_of, sinks, resident.shape[2])))
                else:
                    cap, most = (group.hot_of, None) if uncapped else (group.cap, group.most)
                    plan = plan_swaps(scores, resident, age, hot_of, sinks, cap, step, group.rows, most)
                    outcomes.append(Outcome(group, plan=plan))
            return outcomes

        return run

    def _commit(self, layer: int, wait: bool = False) -> None:
        """Enter the layer's plans if they are ready; a first set is always waited for."""
        if not self.pipeline.busy(layer):
            return
        outcomes = self.pipeline.take(layer, wait or layer in self._seeding)
        if outcomes is None:
            self.stats.add(late_plans=1)
        else:
            self._seeding.discard(layer)
            self._enter(layer, outcomes, counts=self.settings.miss_policy == "drop")

    def _enter(self, layer: int, outcomes: list[Outcome], counts: bool) -> None:
        for outcome in outcomes:
            group = outcome.group
            lives = [self._born.get(row) == born for row, born in group.members]
            alive = slice(None) if all(lives) else torch.tensor(lives)
            if outcome.blocks is not None:
                self.map.seed(layer, group.rows[alive], outcome.blocks[alive], self.step)
            elif outcome.plan is not None:
                plan, moves = outcome.plan, self._moves(layer, group) if group.on_host else None
                if not all(lives):
                    plan, moves = plan.only(alive), moves and moves.only(alive)
                if moves is not None:
                    fetched = plan.misses - plan.capped if all(lives) else int((plan.incoming != EMPTY).sum())
                    self.count_fetched(layer, fetched, moves.page_heads)
                self.map.apply(layer, plan, moves)
                if counts:
                    self.count_choice(layer, plan.hits, plan.misses, plan.capped)

    def _moves(self, layer: int, group: ScoreGroup) -> PageMoves:
        return self.arena.moves(
            layer, group.candidates.index, group.hot, self.geometry.sinks, self.pages[layer], self._per_head(layer)
        )

    def _per_head(self, layer: int) -> bool:
        """Whether each KV head of the layer has a set of its own (a drafter with other heads than the target has one
        set for all of them)."""
        return self.map.heads > 1 and self.layout.layers[layer].shape.heads == self.map.heads

    def count_choice(self, layer: int, hits: int, misses: int, capped: int) -> None:
        """What a layer's queries wanted, and whether it was resident."""
        if not self.layout.layers[layer].is_draft:
            self.stats.add(hits=hits, misses=misses, swaps_capped=capped)

    def count_fetched(self, layer: int, swaps: int, page_heads: int | None) -> None:
        """Swaps that brought in a page of one KV head, or (all heads having one set) of ``page_heads``."""
        pages = swaps if page_heads is None else swaps // self.map.heads * page_heads
        self.stats.add(pages_fetched=pages, bytes_fetched=pages * self.layout.layers[layer].shape.page_bytes)

    def _load(self, layer: int, host: Tensor, head: Tensor, device: Tensor) -> None:
        if self._per_head(layer):
            self.arena.load(layer, host, head, self.pages[layer], device)
            self.count_fetched(layer, len(host), None)
        else:
            one = head == 0
            self.arena.load(layer, host[one], None, self.pages[layer], device[one])
            self.count_fetched(layer, len(host), self.layout.layers[layer].shape.heads)

    # -- the rest

    def take_stats(self) -> OasisStats | None:
        """Counts since the last call."""
        spent = round(1e6 * self.pipeline.busy_seconds) - self._told_microseconds
        if spent:
            self._told_microseconds += spent
            self.stats.add(pipeline_microseconds=spent)
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, OasisStats()
        return stats

    def shutdown(self) -> None:
        """Stop the pipeline; may be called twice."""
        self.pipeline.close()

    def check_integrity(self) -> None:
        """Everything this rank can see: no block twice in a row, no row or stage row lost."""
        self._settle_pipeline()
        windows = {h.row: h.first_window for h in self.held.values()}
        self.map.check_integrity(self.geometry.sinks, windows)
        for held in self.held.values():
            if held.state >= State.IN_PLACE:
                chosen = self.map.block[self.books[0].layers, held.row, :, : held.hot_count]
                assert bool((chosen != EMPTY).all()), f"{held.request_id}: an empty hot slot"
        for book in self.books:
            book.blocks.check_integrity()
        assert set(self._born) == set(windows), "rows and requests differ"
