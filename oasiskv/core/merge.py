"""Merging scores: from one score per query head and query row to one per KV head (or layer) and page."""

from __future__ import annotations

import torch
from torch import Tensor

MERGES = ("softmax_sum", "softmax_max", "mean", "max")
_NEVER = float("-inf")
READ_ON = 0.1
"""Share of a page's mass that counts for the page after it: much for a page that holds much, little for the others."""


def merge_scores(scores: Tensor, valid: Tensor, method: str, row_weight: Tensor | None = None) -> Tensor:
    """Merge the query heads that share a KV head, and the query rows of a request.

    The ``softmax_*`` methods first turn each query head's scores into its estimated shares of the candidates' mass, so
    that a head with sharp attention and a flat one count alike; ``mean`` and ``max`` take the scores as they are.

    Args:
        scores: float32 ``[R, Hkv, rows, G, M, units]``, logs of the masses of a page's units (or ``[R, Hkv, rows, G,
            M]``, of pages); anything in columns that are not valid.
        valid: bool ``[R, M]``: which pages are candidates.
        method: one of ``MERGES``.
        row_weight: bool ``[R, rows]``: which query rows count; all if None. At least one per request must.

    Returns:
        ``[R, Hkv, M]``, ``-inf`` at pages that are no candidates.
    """
    if method not in MERGES:
        raise ValueError(f"group_merge={method!r} is not allowed: use one of {', '.join(MERGES)}")
    if scores.dim() == 5:
        scores = scores.unsqueeze(-1)
    pages = scores.shape[4:]
    if method.startswith("softmax"):  # a page's share is the sum of its units' shares: no logarithm needed
        scores = scores.masked_fill(~valid[:, None, None, None, :, None], _NEVER)
        scores = scores.flatten(4).softmax(-1).unflatten(-1, pages).sum(-1)
    else:
        scores = scores.logsumexp(-1).masked_fill(~valid[:, None, None, None, :], _NEVER)
    if row_weight is None:
        row_weight = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
    unused = ~row_weight[:, None, :, None, None]
    if method.endswith("max"):
        merged = scores.masked_fill(unused, _NEVER).amax((2, 3))
    else:
        merged = scores.masked_fill(unused, 0.0).sum((2, 3))
        if method == "mean":
            merged = merged / (row_weight.sum(1) * scores.shape[3]).view(-1, 1, 1)
    return merged.masked_fill(~valid[:, None, :], _NEVER)


def read_on(merged: Tensor, share: float = READ_ON) -> Tensor:
    """Let each page hand a part of its share to the page after it: ``[R, heads, M]`` of a ``softmax_*`` method.

    A step that copies from a text looks one token further on than the step before it, perhaps across the end of a
    block. The query that is at hand is one step old, so without this the next block comes a step too late.
    """
    handed = merged[..., :-1].clamp_min(0) * share  # -inf (no candidate) hands on nothing
    return torch.cat((merged[..., :1], merged[..., 1:] + handed), dim=-1)


def merge_heads(merged: Tensor, method: str) -> Tensor:
    """One set per layer: merge over KV heads, ``[R, Hkv, M]`` -> ``[R, 1, M]``.

    Shares of mass (the ``softmax_*`` methods) are added; raw scores of different heads are not comparable, so the
    largest counts.
    """
    return merged.sum(1, keepdim=True) if method.startswith("softmax") else merged.amax(1, keepdim=True)
