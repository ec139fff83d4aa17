"""The predictor: which rows of a step speak for the next one.

A request's rows in a decode step::

    row 0: the newest accepted token | rows 1 .. d: real draft tokens | rows d+1 ..: padding (draft token -1)
    "current"                          "lookahead" is row d, the last of them

Row d's query, inside the target model, is the prediction of what the next step will attend. Row 0's is one step old,
but it is never wrong. Their scores are added ("both", the default). Without a draft row 0 speaks alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

POLICIES = ("both", "lookahead", "current")


def real_drafts(draft_tokens: Tensor) -> Tensor:
    """Draft tokens int ``[R, K]``, padded with -1 -> int64 ``[R]``: real ones before the first padding."""
    return (draft_tokens >= 0).long().cumprod(1).sum(1)


def query_rows(q_len: int, real_drafts: int, policy: str) -> tuple[int, ...]:
    """Rows whose queries count, for a request with ``q_len`` rows of which ``real_drafts`` are real draft tokens."""
    _check(policy)
    last = min(real_drafts, q_len - 1)
    if last <= 0 or policy == "current":
        return (0,)
    return (last,) if policy == "lookahead" else (0, last)


def query_rows_batch(q_len: Tensor, real_drafts: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """:func:`query_rows` for R requests at once.

    Args:
        q_len, real_drafts: int ``[R]``.

    Returns:
        Rows int64 ``[R, 2]`` (row 0 and the last real draft row) and weight bool ``[R, 2]``: which of them count.
    """
    _check(policy)
    last = torch.minimum(real_drafts, q_len - 1).long().clamp_min(0)
    drafted = last > 0
    current = torch.full_like(drafted, policy != "lookahead") | ~drafted
    lookahead = drafted & (policy != "current")
    return torch.stack((torch.zeros_like(last), last), dim=1), torch.stack((current, lookahead), dim=1)


def _check(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"predictor={policy!r} is not allowed: use one of {', '.join(POLICIES)}")
