"""The swap plan against a slow reference in plain Python, and what it promises for any input."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.core.swap_plan import EMPTY, first_set, plan_swaps

NEVER = float("-inf")


def reference_top(scores, hot, sinks):
    """Best blocks of one head, best first, ties to the lowest."""
    ranked = sorted((-score, column) for column, score in enumerate(scores) if score > NEVER)
    return [sinks + column for _, column in ranked[:hot]]


def reference_plan(scores, resident, age, hot, sinks, cap):
    """One head of one request: (swaps as (block, slot), kept slots, misses)."""
    top = reference_top(scores, hot, sinks)
    missing = [block for block in top if block not in resident[:hot]]
    kept = [slot for slot in range(hot) if resident[slot] in top]
    victims = sorted(
        (slot for slot in range(hot) if slot not in kept),
        key=lambda slot: (resident[slot] != EMPTY, age[slot] if resident[slot] != EMPTY else 0, slot),
    )
    return list(zip(missing[:cap], victims, strict=False)), kept, len(missing)


@st.composite
def situations(draw):
    """Scores with many ties and holes, partly filled slots of different ages, budgets and caps per request."""
    requests, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    hot, columns, sinks = draw(st.integers(1, 6)), draw(st.integers(1, 12)), draw(st.integers(0, 2))
    hot_of = draw(st.lists(st.integers(1, hot), min_size=requests, max_size=requests))
    cap = draw(st.lists(st.integers(1, 8), min_size=requests, max_size=requests))
    score = st.sampled_from([NEVER, -1.5, -0.0, 0.0, 0.25, 1e-30, 3.0, 7e8])
    scores = [[[draw(score) for _ in range(columns)] for _ in range(heads)] for _ in range(requests)]
    resident, age = [], []
    for r in range(requests):
        resident.append([])
        age.append([])
        for _ in range(heads):
            blocks = draw(st.permutations(range(sinks, sinks + columns)))[: hot_of[r]]
            held = [b if draw(st.booleans()) else EMPTY for b in blocks]
            resident[r].append((held + [EMPTY] * hot)[:hot])
            age[r].append([draw(st.integers(0, 4)) for _ in range(hot)])
    return scores, resident, age, hot_of, sinks, cap


def tensors(situation):
    scores, resident, age, hot_of, sinks, cap = situation
    as_int = {"dtype": torch.int32}
    return (
        torch.tensor(scores), torch.tensor(resident, **as_int), torch.tensor(age, **as_int),
        torch.tensor(hot_of, **as_int), sinks, torch.tensor(cap),
    )  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(situations())
def test_plan_is_that_of_the_reference(situation):
    scores, resident, age, hot_of, sinks, cap = situation
    plan = plan_swaps(*tensors(situation), step=9)
    hits = misses = swaps = 0
    for r in range(len(scores)):
        for h in range(len(scores[r])):
            wanted, kept, missing = reference_plan(scores[r][h], resident[r][h], age[r][h], hot_of[r], sinks, cap[r])
            found = [
                pair for pair in zip(plan.incoming[r, h].tolist(), plan.slot[r, h].tolist(), strict=True)
                if pair[0] != EMPTY
            ]  # fmt: skip
            assert found == wanted
            assert plan.kept[r, h].nonzero().flatten().tolist() == kept
            hits, misses, swaps = hits + len(kept), misses + missing, swaps + len(wanted)
    assert (plan.hits, plan.misses, plan.capped) == (hits, misses, misses - swaps)
    assert plan.incoming.dtype == plan.slot.dtype == torch.int32
    assert ((plan.incoming == EMPTY) == (plan.slot == EMPTY)).all()


@settings(max_examples=100, deadline=None)
@given(situations())
def test_first_set_is_that_of_the_reference(situation):
    scores, resident, _, hot_of, sinks, _ = situation
    hot = len(resident[0][0])
    blocks = first_set(tensors(situation)[0], tensors(situation)[3], sinks, hot)
    for r in range(len(scores)):
        for h in range(len(scores[r])):
            top = reference_top(scores[r][h], hot_of[r], sinks)
            assert blocks[r, h].tolist() == top + [EMPTY] * (hot - len(top))


def test_an_uncapped_plan_from_the_first_set_asks_for_nothing():
    scores = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(0))
    hot_of = torch.tensor([4, 6])
    resident = first_set(scores, hot_of, sinks=1, hot=6)
    plan = plan_swaps(scores, resident, torch.zeros_like(resident), hot_of, 1, cap=99, step=1)
    assert plan.misses == 0 and plan.hits == 3 * (4 + 6) and (plan.incoming == EMPTY).all()


def test_best_scores_come_first_under_the_cap_and_the_oldest_goes():
    scores = torch.tensor([[[9.0, 1.0, 8.0, 7.0, 0.0]]])  # blocks 1 .. 5
    resident = torch.tensor([[[2, 5, 4]]], dtype=torch.int32)
    age = torch.tensor([[[6, 3, 8]]], dtype=torch.int32)
    plan = plan_swaps(scores, resident, age, torch.tensor([3]), sinks=1, cap=1, step=9)
    assert plan.incoming.tolist() == [[[1]]] and plan.slot.tolist() == [[[1]]]  # block 1 for block 5, of age 3
    assert (plan.hits, plan.misses, plan.capped) == (1, 2, 1)


def test_no_requests_and_no_candidates_are_no_special_case():
    resident = torch.full((0, 2, 3), EMPTY, dtype=torch.int32)
    plan = plan_swaps(torch.zeros(0, 2, 5), resident, resident, torch.zeros(0), 1, cap=2, step=0)
    assert plan.incoming.shape[:2] == (0, 2)
    resident = torch.tensor([[[1, 2]]], dtype=torch.int32)
    plan = plan_swaps(torch.zeros(1, 1, 0), resident, resident, torch.tensor([2]), 1, cap=2, step=0)
    assert (plan.hits, plan.misses, plan.capped) == (0, 0, 0)
