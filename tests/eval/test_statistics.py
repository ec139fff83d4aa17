"""Intervals of paired differences: known answers, and whether they hold the true mean as often as they say."""

import math

import numpy as np
import pytest

from oasiskv.eval.statistics import Interval, paired, student_t, token_blocks


def held(intervals: list[Interval]) -> float:
    """Share of the intervals that hold the true mean, which is 0 in all simulations here."""
    return sum(found.low <= 0 <= found.high for found in intervals) / len(intervals)


def test_the_mean_is_that_of_the_items_however_large_the_groups():
    found = paired([1, 1, 1, 1, 5, 6], groups=["a", "a", "a", "a", "b", "c"])
    assert found.mean == 2.5
    assert found.low < 2.5 < found.high


def test_no_difference_is_known_exactly():
    assert paired(np.zeros(8)) == Interval(0, 0, 0)


def test_an_interval_of_many_items_is_the_textbooks():
    values = np.random.default_rng(0).normal(0.3, 2.0, size=400)
    half = 1.966 * values.std(ddof=1) / 20  # Student's t with 399 degrees of freedom
    found = paired(values)
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)


def test_three_groups_are_drawn_whole():
    # Group means 0, 3 and 6: the drawn means' extremes are 0 and 6, drawn once in 27 times each, more than 2.5 %.
    # sqrt(3 / 2) x 4.303 (Student's t, 2 degrees of freedom) / 1.960 = 2.689 times as far from 3.
    found = paired([0, 0, 3, 3, 6, 6], groups=[7, 7, 8, 8, 9, 9])
    assert found.mean == 3
    assert (found.low, found.high) == pytest.approx((3 - 2.689 * 3, 3 + 2.689 * 3), abs=0.01)


def test_two_groups_say_nothing_about_groups():
    values = [0.0, 1.0, 2.0, 3.0]
    assert paired(values, groups=[0, 0, 1, 1]) == paired(values)


def test_one_item_has_no_interval():
    found = paired([2.0])
    assert found.mean == 2
    assert math.isnan(found.low)
    assert found.text(1) == "+2.0"


def test_the_seed_decides_and_nothing_else():
    values = np.random.default_rng(0).normal(size=12)
    assert paired(values, seed=3) == paired(values, seed=3) != paired(values, seed=4)


def test_more_confidence_is_a_wider_interval():
    values = np.random.default_rng(0).normal(size=12)
    narrow, wide = paired(values, confidence=0.8), paired(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(("values", "groups"), [([], None), ([1.0, 2.0], [0])])
def test_wrong_shapes_are_refused(values, groups):
    with pytest.raises(ValueError, match="as many of both"):
        paired(values, groups)


@pytest.mark.parametrize("documents", [4, 8, 20])
def test_intervals_of_documents_hold_the_mean_as_often_as_they_say(documents):
    source = np.random.default_rng(documents)
    found = []
    for _ in range(150):
        groups = np.repeat(np.arange(documents), 5)
        values = source.normal(size=documents)[groups] + source.normal(size=groups.size)  # questions of one are alike
        found.append((paired(values, groups), paired(values)))
    assert 0.90 <= held([by_document for by_document, _ in found]) <= 0.995
    assert held([by_item for _, by_item in found]) < 0.88  # what grouping is for


def test_intervals_of_token_blocks_hold_the_mean_of_correlated_tokens():
    source = np.random.default_rng(5)
    found = []
    for _ in range(100):
        noise = source.normal(size=(4, 160))
        for step in range(1, 160):
            noise[:, step] += 0.8 * noise[:, step - 1]  # autoregressive: 9 tokens count as one
        found.append((paired(noise.ravel(), token_blocks([160] * 4)), paired(noise.ravel())))
    assert 0.88 <= held([by_block for by_block, _ in found]) <= 0.99
    assert held([by_token for _, by_token in found]) < 0.65


def test_blocks_begin_anew_with_each_text():
    assert token_blocks([5, 0, 3], size=2).tolist() == [0, 0, 1, 1, 2, 3, 3, 4]


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (10_000, 1.960)])
def test_students_t_is_that_of_the_tables(freedom, quantile):
    assert student_t(0.95, freedom) == pytest.approx(quantile, abs=0.001)


def test_text_gives_signs():
    assert Interval(0.5, -0.25, 1.25).text(2) == "+0.50 (-0.25 to +1.25)"
