"""Which rows of a step speak for the next one."""

import pytest
import torch

from oasiskv.core.predictor import POLICIES, query_rows, query_rows_batch, real_drafts


@pytest.mark.parametrize(
    ("q_len", "drafts", "policy", "rows"),
    [
        (4, 3, "both", (0, 3)),
        (4, 3, "lookahead", (3,)),
        (4, 3, "current", (0,)),
        (4, 1, "both", (0, 1)),  # two rows of padding
        (4, 0, "both", (0,)),
        (4, 0, "lookahead", (0,)),  # no draft: row 0 speaks alone
        (1, 0, "both", (0,)),
        (2, 5, "both", (0, 1)),  # fewer rows than drafts: the last row there is
    ],
)
def test_rows_by_policy(q_len, drafts, policy, rows):
    assert query_rows(q_len, drafts, policy) == rows


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_says_the_same(policy):
    cases = [(q_len, drafts) for q_len in range(1, 5) for drafts in range(6)]
    q_len, drafts = torch.tensor(cases).T
    rows, weight = query_rows_batch(q_len, drafts, policy)
    found = [tuple(r[w].tolist()) for r, w in zip(rows, weight, strict=True)]
    assert found == [query_rows(*case, policy) for case in cases]
    assert (rows < q_len.unsqueeze(1)).all() and weight.any(1).all()


def test_padding_is_not_a_draft():
    assert real_drafts(torch.tensor([[5, 0, 7], [5, -1, -1], [-1, -1, -1], [5, -1, 7]])).tolist() == [3, 1, 0, 1]


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="lookahead"):
        query_rows(2, 1, "draft")
