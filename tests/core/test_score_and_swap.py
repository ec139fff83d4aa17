"""A layer's choice in one call, beside the same choice step by step."""

import pytest
import torch

from oasiskv.core import kernels
from oasiskv.core.page_scores import Candidates, has_kernel, page_scores
from oasiskv.core.residency import PageMoves, ResidencyMap
from oasiskv.core.score_and_swap import SwapBatch, SwapLayer
from oasiskv.core.scorers import TwoBitScorer, make_scorer
from oasiskv.core.settings import PART_TOKENS
from oasiskv.core.summary_store import SummaryStore
from oasiskv.core.swap_plan import plan_swaps

pytestmark = pytest.mark.skipif(not kernels.are_built(), reason="no compiler: torch does the kernels' work here")

HEADS, GROUP, DIM, BLOCKS, COLUMNS, HOT, SINKS, LAYERS = 2, 3, 64, 60, 18, 6, 1, 3
REFINE, SCALE = 8, 0.125


class World:
    """Three requests of two lengths and budgets, one with a draft, their summaries, sets and pages."""

    def __init__(self, dtype: torch.dtype) -> None:
        dice = torch.Generator().manual_seed(2)
        self.scorer = TwoBitScorer(DIM, dtype)
        keys = torch.randn(BLOCKS * 2, PART_TOKENS, HEADS, DIM, generator=dice)
        keys += 2 * torch.randn(BLOCKS * 2, 1, HEADS, DIM, generator=dice)
        self.store = SummaryStore.zeros(HEADS, BLOCKS, self.scorer.page_bytes(2), self.scorer.outline_bytes)
        self.store.put(torch.arange(BLOCKS), self.scorer.summarise(keys.view(BLOCKS, -1, HEADS, DIM)))
        self.queries = [torch.randn(5, HEADS * GROUP, DIM, generator=dice).to(dtype) for _ in range(12)]
        self.candidates = Candidates(
            index=torch.randperm(BLOCKS, generator=dice)[: 3 * COLUMNS].view(3, COLUMNS),
            counts=torch.tensor([COLUMNS, 13, COLUMNS]),
            rows=torch.tensor([[0, 1], [2, 2], [4, 4]]),
            row_counts=torch.tensor([[True, True], [True, False], [True, False]]),
        )
        self.residency = ResidencyMap(LAYERS, HEADS, HOT)
        for _ in range(2):
            self.residency.allocate()
        self.rows = torch.tensor([self.residency.allocate(hot) for hot in (6, 4, 6)])
        self.residency.seed(1, self.rows, torch.arange(4).expand(3, HEADS, 4) + SINKS)
        self.hot = torch.randperm(18, generator=dice).view(3, HOT)
        self.cap, self.most = torch.tensor([2, 1, 6]), 6
        self.host = torch.randint(0, 1 << 40, (BLOCKS * 4, 5), generator=dice)
        self.device = torch.zeros(18 * HEADS, 5, dtype=torch.int64)
        self.counts: list[tuple[int, int, int]] = []

    def moves(self) -> PageMoves:
        return PageMoves(self.candidates.index, self.hot, SINKS, self.host, 4, 1, self.device, HEADS)

    def at_once(self, moving: bool) -> None:
        layer = SwapLayer(1, self.scorer, self.store, self.queries[0], SCALE, self.moves() if moving else None)
        hot_of = self.residency.hot_of[self.rows].long()
        for step, queries in enumerate(self.queries):
            batch = SwapBatch(
                self.candidates,
                self.residency,
                self.rows,
                hot_of,
                self.hot,
                self.cap,
                self.most,
                sinks=SINKS,
                step=step,
                refine=REFINE,
            )
            self.counts.append(layer.choose(batch, queries))

    def step_by_step(self, moving: bool) -> None:
        for step, queries in enumerate(self.queries):
            scores = page_scores(self.scorer, queries, self.store, self.candidates, SCALE, refine=REFINE)
            resident, age, hot_of = self.residency.of(1, self.rows)
            plan = plan_swaps(scores, resident, age, hot_of, SINKS, self.cap, step, self.rows, self.most)
            self.residency.apply(1, plan, self.moves() if moving else None)
            self.counts.append((plan.hits, plan.misses, plan.capped))


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chooses_what_the_single_steps_choose(dtype, moving) -> None:
    one, other = World(dtype), World(dtype)
    one.at_once(moving)
    other.step_by_step(moving)
    assert one.counts == other.counts and any(misses > capped for _, misses, capped in one.counts)
    assert torch.equal(one.residency.block, other.residency.block)
    assert torch.equal(one.residency.age, other.residency.age)
    assert torch.equal(one.device, other.device) and bool(one.device.any()) == moving


def test_refuses_what_does_not_fit() -> None:
    world = World(torch.bfloat16)
    layer = SwapLayer(1, world.scorer, world.store, world.queries[0], SCALE, world.moves())
    rest = (world.hot, world.cap, world.most)

    def batch(rows: torch.Tensor, residency: ResidencyMap = world.residency) -> SwapBatch:
        hot_of = torch.tensor([6, 4, 6])
        return SwapBatch(world.candidates, residency, rows, hot_of, *rest, sinks=SINKS, step=1, refine=REFINE)

    with pytest.raises(IndexError, match="out of range"):
        layer.choose(batch(world.rows + 8), world.queries[0])
    for wrong in (world.queries[0].float(), world.queries[0][:, :4], world.queries[0][..., :32]):
        with pytest.raises(ValueError, match="do not fit"):
            layer.choose(batch(world.rows), wrong)
    with pytest.raises(ValueError, match="2 KV heads cannot choose for 1"):
        layer.choose(batch(world.rows, ResidencyMap(LAYERS, 1, HOT)), world.queries[0])


def test_says_which_summaries_it_can_use() -> None:
    world = World(torch.bfloat16)
    assert has_kernel(world.scorer, world.store, world.queries[0])
    assert not has_kernel(make_scorer("box", DIM, torch.bfloat16), world.store, world.queries[0])
    assert not has_kernel(world.scorer, world.store, world.queries[0].half())
