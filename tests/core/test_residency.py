"""The residency map as a state machine: any order of its operations leaves it whole, and what is wrong is found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.core.residency import ResidencyMap
from oasiskv.core.swap_plan import EMPTY, first_set, plan_swaps

LAYERS, HEADS, HOT, SINKS, WINDOW = 2, 2, 4, 1, 13


def seeded(rows: int = 2) -> tuple[ResidencyMap, torch.Tensor]:
    residency = ResidencyMap(LAYERS, HEADS, HOT, capacity=2)
    slots = torch.tensor([residency.allocate() for _ in range(rows)])
    blocks = torch.arange(SINKS, SINKS + HOT).expand(rows, HEADS, HOT)
    for layer in range(LAYERS):
        residency.seed(layer, slots, blocks)
    return residency, slots


def windows(residency: ResidencyMap) -> dict[int, int]:
    return {row: WINDOW for row in range(residency.capacity) if residency.hot_of[row]}


def test_rows_are_taken_given_back_and_doubled():
    residency = ResidencyMap(LAYERS, HEADS, HOT, capacity=1)
    first, second, third = (residency.allocate() for _ in range(3))
    assert len({first, second, third}) == 3 and residency.capacity == 4 and residency.held == 3
    residency.release(second)
    assert residency.held == 2 and residency.allocate(hot=2) == second
    assert residency.hot_of[second] == 2


def test_growing_keeps_what_is_there():
    residency, slots = seeded()
    before = residency.block[:, slots].clone()
    residency.allocate()
    assert residency.capacity == 4 and torch.equal(residency.block[:, slots], before)
    residency.check_integrity(SINKS, windows(residency))


def test_apply_writes_the_swaps_and_the_ages_of_what_was_selected():
    residency, slots = seeded(1)
    scores = torch.zeros(1, HEADS, 12)
    scores[0, 0, [0, 1, 2, 9]] = 1.0  # blocks 1, 2, 3 stay, 10 comes, 4 goes
    scores[0, 1, [0, 1, 2, 3]] = 1.0
    resident, age, hot_of = residency.of(1, slots)
    residency.apply(1, plan_swaps(scores, resident, age, hot_of, SINKS, cap=1, step=5, rows=slots))
    row = int(slots[0])
    assert residency.block[1, row].tolist() == [[1, 2, 3, 10], [1, 2, 3, 4]]
    assert residency.age[1, row].tolist() == [[5, 5, 5, 5], [5, 5, 5, 5]]
    assert residency.block[0, row].tolist() == [[1, 2, 3, 4], [1, 2, 3, 4]]


def test_a_block_not_selected_keeps_its_age():
    residency, slots = seeded(1)
    scores = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2]).expand(1, HEADS, 12)
    residency.apply(0, plan_swaps(scores, *residency.of(0, slots), SINKS, cap=1, step=7, rows=slots))
    assert residency.block[0, int(slots[0]), 0].tolist() == [1, 2, 11, 4]
    assert residency.age[0, int(slots[0]), 0].tolist() == [7, 7, 7, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["arrive", "step", "leave"]), max_size=30), st.integers(0, 2**16), st.integers(1, 5))
def test_any_history_leaves_the_map_whole(history, seed, cap):
    generator = torch.Generator().manual_seed(seed)
    residency = ResidencyMap(LAYERS, HEADS, HOT, capacity=1)
    window: dict[int, int] = {}
    for step, event in enumerate(history):
        if event == "arrive":
            row = residency.allocate(1 + step % HOT)
            window[row] = SINKS + HOT + step % 5
            scores = torch.rand(1, HEADS, window[row] - SINKS, generator=generator)
            for layer in range(LAYERS):
                slots = torch.tensor([row])
                residency.seed(layer, slots, first_set(scores, residency.hot_of[slots], SINKS), step)
        elif event == "leave" and window:
            row = sorted(window)[step % len(window)]
            residency.release(row)
            del window[row]
        elif window:
            for row in window:
                window[row] += 1
            slots = torch.tensor(sorted(window))
            scores = torch.rand(len(slots), HEADS, max(window.values()) - SINKS, generator=generator)
            for i, row in enumerate(slots.tolist()):
                scores[i, :, window[row] - SINKS :] = float("-inf")
            for layer in range(LAYERS):
                residency.apply(layer, plan_swaps(scores, *residency.of(layer, slots), SINKS, cap, step, slots))
        residency.check_integrity(SINKS, window)
    for row in window:
        residency.release(row)
    residency.check_integrity(SINKS, {})
    assert residency.held == 0 and (residency.block == EMPTY).all() and (residency.age == 0).all()


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (
            lambda r: r.block[0, 0, 0].copy_(torch.tensor([1, 2, 1, 3])),
            "layer 0, row 0, head 0, hot slot 2: block 1 app",
        ),
        (lambda r: r.block[1, 1, 1, 3].fill_(WINDOW), f"layer 1, row 1, head 1, hot slot 3: block {WINDOW} is not in"),
        (lambda r: r.block[1, 1, 1, 3].fill_(SINKS - 1), "block 0 is not in"),
        (lambda r: r.hot_of[1].fill_(2), "layer 0, row 1, head 0, hot slot 2: block 3 lies beyond"),
        (lambda r: r.allocate(), "not those of running requests"),
        (lambda r: r.hot_of[1].fill_(0), "do not make up"),
    ],
)
def test_damage_is_found_and_named(break_it, told):
    residency, _ = seeded()
    expected = windows(residency)
    residency.check_integrity(SINKS, expected)
    break_it(residency)
    with pytest.raises(AssertionError, match=told):
        residency.check_integrity(SINKS, expected)


def test_wrong_use_is_refused():
    residency, _ = seeded(1)
    with pytest.raises(ValueError, match="1 to 4"):
        residency.allocate(hot=5)
    with pytest.raises(ValueError, match="not held"):
        residency.release(1)
