"""The swap plan: which pages should come into which hot slots, for one layer and a batch of requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oasiskv.core import kernels

EMPTY = -1
"""No block, no slot."""


@dataclass(frozen=True)
class SwapPlan:
    """Swaps for R requests in one layer; at most C per KV head. It changes nothing until the residency map applies it.

    A plan can be carried out in part: put ``EMPTY`` into ``incoming`` where a page is late.
    """

    rows: Tensor
    """int64 ``[R]``: the requests' rows in the residency map."""
    incoming: Tensor
    """int32 ``[R, heads, C]``: logical blocks to bring in, best first, then ``EMPTY``."""
    slot: Tensor
    """int32 ``[R, heads, C]``: the hot slot that each of them takes; ``EMPTY`` where there is none."""
    kept: Tensor
    """bool ``[R, heads, H]``: hot slots whose block was selected again, so that its age is now ``step``."""
    step: int
    hits: int
    """Selected pages that were resident."""
    misses: int
    """Selected pages that were not, before the cap."""
    capped: int
    """Of these, the ones left out because of the cap."""

    def only(self, requests: Tensor) -> SwapPlan:
        """The same plan for some of its requests (bool ``[R]``): the others have left meanwhile."""
        return replace(
            self,
            rows=self.rows[requests],
            incoming=self.incoming[requests],
            slot=self.slot[requests],
            kept=self.kept[requests],
        )


def plan_swaps(
    scores: Tensor,
    resident: Tensor,
    age: Tensor,
    hot_of: Tensor,
    sinks: int,
    cap: Tensor | int,
    step: int,
    rows: Tensor | None = None,
    width: int | None = None,
) -> SwapPlan:
    """Select the best ``hot_of`` blocks and plan the swaps that bring the missing ones in, at most ``cap`` per head.

    Selection is by score, ties to the lowest block. The best-scoring missing blocks come in first. Victims are empty
    slots, then blocks that were not selected, least recently selected first, ties to the lowest slot.

    Args:
        scores: float32 ``[R, heads, M]``; column j is logical block ``sinks + j``; ``-inf`` is no candidate.
        resident: int32 ``[R, heads, H]``: logical block in each hot slot, or ``EMPTY``.
        age: int32 ``[R, heads, H]``: step in which the slot's block was last selected.
        hot_of: int ``[R]``: hot slots that the request owns, at most H.
        sinks: first candidate block.
        cap: most pages per KV head in this step, for all or for each request ``[R]``.
        step: number of this step.
        rows: int64 ``[R]``: the requests' rows in the residency map; ``0 .. R-1`` if None.
        width: the largest ``cap``, where the caller knows it.
    """
    requests = scores.shape[0]
    device = scores.device
    cap = torch.as_tensor(cap, device=device).expand(requests)
    if width is None:
        width = int(cap.max()) if requests else 0
    width = min(width, resident.shape[2], scores.shape[2])
    if rows is None:
        rows = torch.arange(requests, device=device)
    decide = kernels.swap_plans if kernels.take(scores, resident, age) else reference
    incoming, slot, kept, (hits, misses, capped) = decide(scores, resident, age, hot_of, sinks, cap, width)
    return SwapPlan(rows, incoming, slot, kept, step, hits, misses, capped)


def reference(
    scores: Tensor, resident: Tensor, age: Tensor, hot_of: Tensor, sinks: int, cap: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]:
    """The decisions of :func:`plan_swaps` in torch, on any device; as :func:`oasiskv.core.kernels.swap_plans`."""
    requests, heads, columns = scores.shape
    hot = resident.shape[2]
    device = scores.device
    owned = (torch.arange(hot, device=device) < hot_of.view(-1, 1)).unsqueeze(1)  # [R, 1, H]

    top, chosen = _top(scores, hot_of, hot)
    in_top = torch.zeros(requests, heads, columns + 1, dtype=torch.bool, device=device)  # the last column is a bin
    in_top.scatter_(2, torch.where(chosen, top, columns), True)
    in_top[..., columns] = False

    column = resident.long() - sinks
    column = torch.where(owned & (resident >= sinks) & (column < columns), column, columns)
    kept = in_top.gather(2, column)
    is_resident = torch.zeros_like(in_top).scatter_(2, column, True)

    missing = chosen & ~is_resident.gather(2, top)
    rank = missing.cumsum(2) - 1
    taken = missing & (rank < cap.view(-1, 1, 1))
    incoming = torch.full((requests, heads, width + 1), EMPTY, dtype=torch.int32, device=device)
    incoming.scatter_(2, torch.where(taken, rank, width), torch.where(taken, top + sinks, EMPTY).int())
    incoming = incoming[..., :width].contiguous()
    slot = torch.where(incoming != EMPTY, _victims(resident, age, kept, owned)[..., :width], EMPTY).int()
    counts = torch.stack((kept.sum(), missing.sum(), (missing & ~taken).sum())).tolist()
    return incoming, slot, kept, (counts[0], counts[1], counts[2])


def first_set(scores: Tensor, hot_of: Tensor, sinks: int, hot: int | None = None) -> Tensor:
    """The first contents of the hot slots, without a cap: the best blocks, best first.

    Args:
        scores, hot_of, sinks: as for :func:`plan_swaps`.
        hot: width H of the result; the largest ``hot_of`` if None.

    Returns:
        int32 ``[R, heads, H]``: logical blocks; ``EMPTY`` beyond ``hot_of``, and where candidates run out.
    """
    hot = int(hot_of.max()) if hot is None else hot
    top, chosen = _top(scores, hot_of, hot)
    blocks = torch.full((*scores.shape[:2], hot), EMPTY, dtype=torch.int32, device=scores.device)
    blocks[..., : top.shape[2]] = torch.where(chosen, top + sinks, EMPTY).int()
    return blocks


def _top(scores: Tensor, hot_of: Tensor, hot: int) -> tuple[Tensor, Tensor]:
    """Columns ``[R, heads, min(H, M)]`` of the best scores, best first, and which of them are selected."""
    count = min(hot, scores.shape[2])
    top = _ordered_keys(scores).topk(count, dim=2).indices
    selected = torch.arange(count, device=scores.device) < hot_of.view(-1, 1, 1)
    return top, selected & (scores.gather(2, top) > float("-inf"))


def _ordered_keys(scores: Tensor) -> Tensor:
    """int64 keys that order like (score, then lowest column): no two are alike, so ``topk`` has one right answer."""
    bits = (scores.float() + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 a plain zero
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # an IEEE float orders like its sign and magnitude
    return (ordered << 32) | torch.arange(scores.shape[2] - 1, -1, -1, device=scores.device)


def _victims(resident: Tensor, age: Tensor, kept: Tensor, owned: Tensor) -> Tensor:
    """Hot slots ``[R, heads, H]``, those to be given up first in front."""
    limits = torch.iinfo(torch.int64)
    order = torch.where(resident == EMPTY, limits.min, age.long())
    return order.masked_fill(kept | ~owned, limits.max).argsort(dim=2, stable=True)
