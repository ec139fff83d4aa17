"""Merging scores over query heads and rows, against loops."""

import pytest
import torch

from oasiskv.core.merge import MERGES, merge_heads, merge_scores, read_on

REQUESTS, HEADS, ROWS, GROUP, PAGES = 3, 2, 2, 4, 9
NEVER = float("-inf")


@pytest.fixture
def scores() -> torch.Tensor:
    shape = (REQUESTS, HEADS, ROWS, GROUP, PAGES)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3


@pytest.fixture
def valid() -> torch.Tensor:
    valid = torch.ones(REQUESTS, PAGES, dtype=torch.bool)
    valid[1, 5:] = False
    valid[2, ::2] = False
    return valid


def by_hand(scores, valid, method, row_weight):
    merged = torch.full((REQUESTS, HEADS, PAGES), NEVER)
    for r in range(REQUESTS):
        pages = valid[r].nonzero().flatten()
        for h in range(HEADS):
            rows = []
            for row in row_weight[r].nonzero().flatten():
                for g in range(GROUP):
                    values = scores[r, h, row, g, pages]
                    rows.append(values.softmax(0) if method.startswith("softmax") else values)
            stack = torch.stack(rows)
            merged[r, h, pages] = {
                "softmax_sum": stack.sum(0), "softmax_max": stack.amax(0), "mean": stack.mean(0), "max": stack.amax(0)
            }[method]  # fmt: skip
    return merged


@pytest.mark.parametrize("method", MERGES)
@pytest.mark.parametrize("weights", [[[1, 1]] * 3, [[1, 0], [0, 1], [1, 1]]])
def test_merge_is_that_of_the_loops(method, weights, scores, valid):
    row_weight = torch.tensor(weights, dtype=torch.bool)
    torch.testing.assert_close(
        merge_scores(scores, valid, method, row_weight), by_hand(scores, valid, method, row_weight)
    )


def test_all_rows_count_by_default(scores, valid):
    both = torch.ones(REQUESTS, ROWS, dtype=torch.bool)
    torch.testing.assert_close(
        merge_scores(scores, valid, "softmax_sum"), merge_scores(scores, valid, "softmax_sum", both)
    )


@pytest.mark.parametrize("method", MERGES)
def test_garbage_where_nothing_is_valid_does_not_spread(method, scores, valid):
    clean = merge_scores(scores, valid, method, torch.tensor([[1, 0]] * 3, dtype=torch.bool))
    scores.masked_fill_(~valid[:, None, None, None, :], float("nan"))
    scores[:, :, 1] = float("nan")  # a row that does not count
    torch.testing.assert_close(merge_scores(scores, valid, method, torch.tensor([[1, 0]] * 3, dtype=torch.bool)), clean)


@pytest.mark.parametrize("method", MERGES)
def test_a_request_without_candidates_gets_no_page(method, scores, valid):
    valid[0] = False
    assert (merge_scores(scores, valid, method)[0] == NEVER).all()


def test_softmax_sum_hands_out_one_unit_of_mass_per_query_head(scores, valid):
    merged = merge_scores(scores, valid, "softmax_sum")
    total = merged.masked_fill(merged == NEVER, 0).sum(-1)
    torch.testing.assert_close(total, torch.full_like(total, ROWS * GROUP))


def test_a_sharp_head_and_a_flat_one_count_alike(scores):
    """Raw logits would let the head with the larger scale decide alone."""
    scores = torch.tensor([[[[[100.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]]])
    merged = merge_scores(scores, torch.ones(1, 3, dtype=torch.bool), "softmax_sum")
    assert merged[0, 0].argsort(descending=True).tolist() == [0, 2, 1]


@pytest.mark.parametrize(("method", "merge"), [("softmax_sum", torch.sum), ("max", torch.amax)])
def test_one_set_per_layer_merges_the_kv_heads(method, merge, scores, valid):
    merged = merge_scores(scores, valid, method)
    layer = merge_heads(merged, method)
    assert layer.shape == (REQUESTS, 1, PAGES)
    torch.testing.assert_close(layer[:, 0], merge(merged, 1))


def test_unknown_method_is_refused(scores, valid):
    with pytest.raises(ValueError, match="softmax_sum"):
        merge_scores(scores, valid, "softsum")


def test_a_page_hands_a_part_of_its_share_to_the_page_after_it() -> None:
    merged = torch.tensor([[[0.9, 0.0, 0.06, 0.04, NEVER]]])
    handed = read_on(merged, 0.1)
    torch.testing.assert_close(handed, torch.tensor([[[0.9, 0.09, 0.06, 0.046, NEVER]]]))
    assert torch.equal(merged, torch.tensor([[[0.9, 0.0, 0.06, 0.04, NEVER]]]))
