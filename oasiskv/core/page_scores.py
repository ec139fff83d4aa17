"""From queries and summaries to one score per request, KV head and page: what the selection goes by.

    queries of a request's rows --+
    summaries of its pages -------+--> estimates --> merge over query heads and rows --> read on --> [R, KV heads, M]

A scorer that makes outlines of pages (`q2` does: a box) reads all of them, and the rest only of the ``refine`` pages
that they rank first: what grows with the context is the reading of outlines. A query's coarse masses are scaled to what
its fine ones say where both are known, so that the two kinds add up to one distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.core import kernels
from oasiskv.core.merge import READ_ON, merge_scores, read_on
from oasiskv.core.scorers import Scorer, TwoBitScorer
from oasiskv.core.summary_store import SummaryStore

_NEVER = float("-inf")
_MOST_ABOVE, _MOST_SCALE = 60.0, 1e30
"""A token's logit by its code may be far above what any outline promised: bounds that keep sums in a float's range."""


@dataclass(frozen=True)
class Candidates:
    """The pages that R requests can choose from, and whose queries choose.

    ``index`` int64 ``[R, M]``: block of the store that summarises each of them, in the first ``counts`` int64 ``[R]``
    columns. ``rows`` int64 ``[R, 2]``: tokens of the step; ``row_counts`` bool ``[R, 2]``: which of them speak.
    """

    index: Tensor
    counts: Tensor
    rows: Tensor
    row_counts: Tensor

    @property
    def valid(self) -> Tensor:
        """bool ``[R, M]``: which columns are candidates."""
        return torch.arange(self.index.shape[1]) < self.counts.view(-1, 1)


def page_scores(
    scorer: Scorer,
    queries: Tensor,
    store: SummaryStore,
    candidates: Candidates,
    scale: float,
    merge: str = "softmax_sum",
    refine: int | None = None,
) -> Tensor:
    """Scores float32 ``[R, KV heads, M]`` of the candidates; ``-inf`` in columns that are none.

    Args:
        queries: float ``[tokens, query heads, D]``, after RoPE.
        store: what ``scorer`` made of the pages.
        scale: the softmax scale.
        merge: see :mod:`oasiskv.core.merge`; what the ``softmax_*`` methods yield are shares of mass, read on.
        refine: pages per request and KV head that are judged by more than their outlines, where the scorer makes such
            and ``merge`` is ``softmax_sum``; all if None.
    """
    shares = merge == "softmax_sum"
    most = candidates.index.shape[1]
    refine = within(refine if shares else None, most)
    if shares and most and has_kernel(scorer, store, queries):
        assert isinstance(scorer, TwoBitScorer)
        return kernels.two_bit_scores(
            store,
            scorer.dtype,
            queries,
            candidates.rows,
            candidates.row_counts,
            candidates.index,
            candidates.counts,
            scale=scale,
            read_on=READ_ON,
            refine=refine,
        )
    return reference(scorer, queries, store, candidates, scale, merge, refine)


def within(refine: int | None, columns: int) -> int:
    """``refine`` where there are so many columns."""
    return columns if refine is None else max(1, min(refine, columns))


def has_kernel(scorer: Scorer, store: SummaryStore, queries: Tensor) -> bool:
    """Whether a compiled kernel can score by these summaries for these queries, merged as shares of mass."""
    return (
        isinstance(scorer, TwoBitScorer)
        and scorer.head_dim <= kernels.MOST_DIM
        and queries.dtype in (torch.float32, torch.bfloat16)
        and kernels.take(store.memory, queries)
    )


def reference(
    scorer: Scorer,
    queries: Tensor,
    store: SummaryStore,
    candidates: Candidates,
    scale: float,
    merge: str,
    refine: int,
) -> Tensor:
    """:func:`page_scores` in torch, for all scorers and devices."""
    heads = store.bodies.shape[0]
    index, rows, weight = candidates.index, candidates.rows, candidates.row_counts
    if not bool(weight[:, 1].any()):  # nobody has a draft
        rows, weight = rows[:, :1], weight[:, :1]
    requests, columns = index.shape
    grouped = queries[rows]  # [R, rows, query heads, D]
    grouped = grouped.unflatten(2, (heads, -1)).permute(2, 0, 1, 3, 4).flatten(0, 1).flatten(1, 2)
    valid = candidates.valid

    def estimate(by: Scorer, summaries: Tensor) -> Tensor:
        """``[R, KV heads, rows, group, M, units]`` from uint8 ``[KV heads, R * M, bytes]``."""
        units = by.estimate(grouped, summaries.reshape(heads * requests, columns, -1), scale)
        return units.unflatten(1, (rows.shape[1], -1)).unflatten(0, (heads, requests)).transpose(0, 1)

    picked = store.get(index.view(-1))
    fine = estimate(scorer, picked)
    coarse = scorer.coarse
    if coarse is None or refine >= columns:
        merged = merge_scores(fine, valid, merge, weight)
    else:
        outlines = estimate(coarse, picked[..., : scorer.outline_bytes])
        merged = _two_stages(outlines, fine, valid, weight, refine)
    return read_on(merged) if merge.startswith("softmax") else merged


def _two_stages(coarse: Tensor, fine: Tensor, valid: Tensor, weight: Tensor, refine: int) -> Tensor:
    """Shares ``[R, KV heads, M]`` from coarse and fine logits ``[R, KV heads, rows, group, M, units]``."""
    ranked = merge_scores(coarse, valid, "softmax_sum", weight)
    best = torch.zeros_like(ranked, dtype=torch.bool).scatter_(2, ranked.topk(refine, dim=2).indices, True)
    best = (best & valid.unsqueeze(1))[:, :, None, None]
    within = valid[:, None, None, None]
    offset = coarse.masked_fill(~within.unsqueeze(-1), _NEVER).amax((-1, -2), keepdim=True)
    coarse_mass = (coarse - offset).exp().sum(-1).masked_fill(~within, 0.0)  # [R, KV heads, rows, group, M]
    fine_mass = (fine - offset).clamp(max=_MOST_ABOVE).exp().sum(-1).masked_fill(~best, 0.0)
    promised = coarse_mass.masked_fill(~best, 0.0).sum(-1, keepdim=True)
    to_fine = (fine_mass.sum(-1, keepdim=True) / promised).masked_fill(promised == 0, 0.0).clamp(max=_MOST_SCALE)
    mass = torch.where(best, fine_mass, coarse_mass * to_fine)
    shares = mass / mass.sum(-1, keepdim=True)
    shares = shares.masked_fill(~weight[:, None, :, None, None], 0.0).sum((2, 3))
    return shares.masked_fill(~valid[:, None, :], _NEVER)
