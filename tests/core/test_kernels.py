"""The compiled kernels beside their references in torch."""

import pytest
import torch

from oasiskv.core import kernels, native, page_scores, swap_plan
from oasiskv.core.merge import READ_ON
from oasiskv.core.page_scores import Candidates
from oasiskv.core.residency import PageMoves, ResidencyMap
from oasiskv.core.scorers import TwoBitScorer
from oasiskv.core.settings import PART_TOKENS
from oasiskv.core.summaries import LayerSummaries, SummaryBook, Written
from oasiskv.core.summary_store import SummaryStore
from oasiskv.core.swap_plan import EMPTY, plan_swaps

FORMATS = (torch.float32, torch.bfloat16, torch.int8)
pytestmark = pytest.mark.skipif(not kernels.are_built(), reason="no compiler: torch does the kernels' work here")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(scorer: TwoBitScorer, keys: torch.Tensor) -> SummaryStore:
    """Summaries of keys ``[blocks, tokens, heads, D]``."""
    summaries = scorer.summarise(keys)
    store = SummaryStore.zeros(keys.shape[2], len(keys), summaries.shape[2], scorer.outline_bytes)
    store.put(torch.arange(len(keys)), summaries)
    return store


def world(dim: int, group: int, dtype: torch.dtype, query_dtype: torch.dtype, parts: int = 2):
    """A scorer, strided queries, a store, and candidates of three requests: with drafts, without, with no page."""
    dice = generator(0)
    heads, blocks, columns = 2, 60, 20
    scorer = TwoBitScorer(dim, dtype)
    keys = torch.randn(blocks * parts, PART_TOKENS, heads, dim, generator=dice)
    keys += 2 * torch.randn(blocks * parts, 1, heads, dim, generator=dice)
    store = filled(scorer, keys.view(blocks, -1, heads, dim))
    wide = torch.randn(7, heads * (group + 2) * dim, generator=dice).to(query_dtype)
    queries = wide[:, : heads * group * dim].view(7, heads * group, dim)
    candidates = Candidates(
        index=torch.randperm(blocks, generator=dice).view(3, columns),
        counts=torch.tensor([columns, 13, 0]),
        rows=torch.tensor([[0, 2], [3, 4], [5, 5]]),
        row_counts=torch.tensor([[True, True], [True, False], [True, False]]),
    )
    return scorer, queries, store, candidates


@pytest.mark.parametrize("isa", range(kernels.best_isa() + 1))
@pytest.mark.parametrize("refine", [1, 6, 13, 20])
@pytest.mark.parametrize(("dim", "group"), [(64, 7), (64, 3), (20, 1), (80, 9), (128, 4), (256, 2)])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_scores_are_the_references(isa, refine, dim, group, dtype, parts) -> None:
    query_dtype = torch.float32 if dtype is torch.float32 else torch.bfloat16
    scorer, queries, store, candidates = world(dim, group, dtype, query_dtype, parts)
    scale = dim**-0.5 / 4
    exact = page_scores.reference(scorer, queries, store, candidates, scale, "softmax_sum", refine)
    found = kernels.two_bit_scores(
        store,
        dtype,
        queries,
        candidates.rows,
        candidates.row_counts,
        candidates.index,
        candidates.counts,
        scale=scale,
        read_on=READ_ON,
        refine=refine,
        isa=isa,
    )
    assert torch.equal(found == float("-inf"), exact == float("-inf"))
    valid = candidates.valid.unsqueeze(1).expand_as(found)
    if refine < 20 and (isa == 2 or dtype is not torch.float32):  # another page may be the last that is refined
        assert (found - exact)[valid].abs().max() < 0.03
        assert exact[valid].max() > 0.15, "the shares are too even to tell pages apart"
        return
    tolerance = 1e-4 if dtype is torch.float32 and isa < 2 else 0.03
    torch.testing.assert_close(found[valid], exact[valid], rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("isa", [None, *range(kernels.best_isa() + 1)])
@pytest.mark.parametrize("refine", [6, 20])
def test_codes_far_above_what_the_outlines_promise_are_still_shares(isa, refine, monkeypatch) -> None:
    """All of a part's keys but one lie at its lower corner: the one has twice the box's estimate of it."""
    scorer, queries, store, candidates = world(64, 3, torch.float32, torch.float32)
    queries = torch.full_like(queries, 40.0)
    keys = -torch.ones(60, 2 * PART_TOKENS, 2, 64)
    keys[:, 0] = 1.0
    store = filled(scorer, keys)
    if isa is None:
        found = page_scores.reference(scorer, queries, store, candidates, 0.125, "softmax_sum", refine)
    else:
        monkeypatch.setattr(kernels, "best_isa", lambda: isa)
        found = page_scores.page_scores(scorer, queries, store, candidates, 0.125, refine=refine)
    assert found[candidates.valid.unsqueeze(1).expand_as(found)].isfinite().all()


@pytest.mark.parametrize("key_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dim", [20, 64, 128])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_layers_step_is_the_references_to_the_bit(key_dtype, dtype, dim, parts, monkeypatch) -> None:
    """Whole blocks of a chunk, keys that wait, and blocks that they complete, from strided keys."""
    scorer, size = TwoBitScorer(dim, dtype), parts * PART_TOKENS

    def carry_out() -> SummaryStore:
        store = SummaryStore.zeros(3, 14, scorer.page_bytes(parts), scorer.outline_bytes)
        layer = LayerSummaries(scorer, store, size, key_dtype)
        book, dice, start = SummaryBook(14, size), generator(5), 0
        blocks = torch.randperm(14, generator=dice).tolist()
        for count in (71, 7, 1, 2, 47, 64):
            wide = torch.randn(count, 3 * 3 * dim, generator=dice).to(key_dtype)
            keys = wide[:, 3 * dim : 6 * dim].view(count, 3, dim)
            layer.apply(book.write([Written(start, count, 0, 0, blocks)]), keys)
            start += count
        assert start == 192
        layer.apply(book.finish([(blocks[192 // size - 1], size)]), None)
        here = torch.tensor(blocks[: 192 // size])
        assert store.outlines[:, here].any(-1).all() and store.bodies[:, here].any(-1).all()
        return store

    found = carry_out()
    monkeypatch.setattr(kernels, "take", lambda *tensors: False)
    assert torch.equal(found.memory, carry_out().memory)


def test_kernels_of_another_version_are_left_alone(monkeypatch, caplog) -> None:
    monkeypatch.setattr(native, "IN_ORDER", native.IN_ORDER[:-1])
    assert kernels.library.__wrapped__() is None
    assert "another version" in caplog.text and "pip install" in caplog.text


def test_a_layer_refuses_keys_that_do_not_fit() -> None:
    scorer = TwoBitScorer(64, torch.bfloat16)
    store = SummaryStore.zeros(2, 2, scorer.page_bytes(2), scorer.outline_bytes)
    layer = kernels.TwoBitLayer(store, 64, torch.bfloat16, torch.bfloat16)
    layer.stage(torch.zeros(32, 2, 64, dtype=torch.bfloat16))
    nothing = torch.empty(0, dtype=torch.int64)
    names = ("stage_tokens", "stage_slots", "bulk_first", "bulk_blocks", "staged_rows", "staged_blocks")

    def writes(**given: int) -> kernels.TwoBitWrites:
        return kernels.TwoBitWrites(**{n: torch.tensor([given[n]]) if n in given else nothing for n in names})

    keys = torch.zeros(32, 2, 64, dtype=torch.bfloat16)
    for wrong in (keys.float(), keys[..., :32], keys.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            layer.write(writes(), wrong)
    outside = (
        {"stage_tokens": 32, "stage_slots": 0},
        {"stage_tokens": 0, "stage_slots": 32},
        {"bulk_first": 1, "bulk_blocks": 0},
        {"bulk_first": 0, "bulk_blocks": 2},
        {"staged_rows": 1, "staged_blocks": 0},
        {"staged_rows": 0, "staged_blocks": 2},
    )
    for places in outside:
        with pytest.raises(IndexError, match="out of range"):
            layer.write(writes(**places), keys)


@pytest.mark.parametrize("seed", range(20))
def test_plans_are_the_references(seed) -> None:
    dice = generator(seed)
    requests, heads, columns, hot, sinks = 5, 2, 30, 8, 1
    scores = torch.randint(0, 9, (requests, heads, columns), generator=dice).float()  # many ties
    scores[0, :, 20:] = float("-inf")
    scores[1, :, 3:] = float("-inf")  # fewer candidates than slots
    resident = torch.stack([torch.randperm(columns, generator=dice)[:hot] for _ in range(requests * heads)]) + sinks
    resident = resident.view(requests, heads, hot).int()
    resident[2, :, 5:] = EMPTY
    hot_of = torch.tensor([8, 8, 8, 4, 1])
    resident[torch.arange(hot).expand_as(resident) >= hot_of.view(-1, 1, 1)] = EMPTY
    age = torch.randint(0, 3, resident.shape, generator=dice).int()
    cap = torch.randint(1, hot + 1, (requests,), generator=dice)
    given = (scores, resident, age, hot_of, sinks, cap, int(cap.max()))
    found, exact = kernels.swap_plans(*given), swap_plan.reference(*given)
    for one, other in zip(found[:3], exact[:3], strict=True):
        assert torch.equal(one, other)
    assert found[3] == exact[3]


@pytest.mark.parametrize("per_head", [True, False])
def test_swaps_are_entered_like_the_references(per_head, monkeypatch) -> None:
    def carry_out() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dice = generator(3)
        heads, hot, sinks, columns = 2 if per_head else 1, 6, 1, 20
        residency = ResidencyMap(2, heads, hot)
        rows = torch.tensor([residency.allocate() for _ in range(3)])
        first = torch.arange(hot).expand(3, heads, hot) + sinks
        residency.seed(1, rows, first)
        scores = torch.rand(3, heads, columns, generator=dice)
        plan = plan_swaps(scores, *residency.of(1, rows), sinks, 3, 9, rows)
        moves = PageMoves(
            index=torch.randperm(60, generator=dice).view(3, 20),
            hot=torch.randperm(18, generator=dice).view(3, 6),
            sinks=sinks,
            host=torch.randint(0, 1 << 40, (60 * 4, 5), generator=dice),
            host_stride=4,
            host_first=1,
            device=torch.zeros(18 * 2, 5, dtype=torch.int64),
            device_stride=2,
            page_heads=None if per_head else 2,
        )
        residency.apply(1, plan, moves)
        return residency.block, residency.age, moves.device

    found = carry_out()
    monkeypatch.setattr(kernels, "take", lambda *tensors: False)
    exact = carry_out()
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other)
    assert exact[2].any()


def test_rows_are_copied_between_strided_tensors() -> None:
    source, target = torch.arange(40).view(5, 8)[:, 2:5], torch.zeros(4, 3, dtype=torch.int64)
    kernels.copy_rows(source, torch.tensor([4, 0]), target, torch.tensor([0, 3]))
    assert target.tolist() == [[34, 35, 36], [0] * 3, [0] * 3, [2, 3, 4]]


def test_what_is_out_of_range_is_refused() -> None:
    source, target = torch.zeros(4, 3), torch.zeros(4, 3)
    for rows in ([4], [-1]):
        with pytest.raises(IndexError, match="out of range"):
            kernels.copy_rows(source, torch.tensor(rows), target, torch.tensor([0]))
    scorer, queries, store, candidates = world(64, 2, torch.float32, torch.float32)
    for bad in (
        {"index": candidates.index + 60},
        {"counts": candidates.counts + 1},
        {"rows": candidates.rows + 7},
    ):
        given = Candidates(**{**vars(candidates), **bad})
        with pytest.raises(IndexError, match="out of range"):
            page_scores.page_scores(scorer, queries, store, given, 0.1)
