"""The residency map: which logical block lies in which hot slot, for each layer, request and KV head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oasiskv.core import kernels
from oasiskv.core.swap_plan import EMPTY, SwapPlan


@dataclass(frozen=True)
class PageMoves:
    """Where the pages of a plan lie, and where they go.

    A page is one row of ``host`` ``[rows, n]`` and of ``device``: that of block b and KV head h is row
    ``host_stride * b + host_first + h``, or ``device_stride * b + h``. ``index`` int64 ``[R, M]``: host block of each
    candidate, the first of which is logical block ``sinks``; ``hot`` int64 ``[R, H]``: device block of each slot.
    ``page_heads``: pages of a slot, where all KV heads have one set; None where each has its own.
    """

    index: Tensor
    hot: Tensor
    sinks: int
    host: Tensor
    host_stride: int
    host_first: int
    device: Tensor
    device_stride: int
    page_heads: int | None = None

    def copy(self, plan: SwapPlan) -> None:
        """Bring in the plan's pages."""
        request, head, swap = (plan.incoming != EMPTY).nonzero(as_tuple=True)
        source = self.index[request, plan.incoming[request, head, swap].long() - self.sinks]
        target = self.hot[request, plan.slot[request, head, swap].long()]
        if self.page_heads is not None:
            first = head == 0  # all sets are alike
            source, target = (t[first].repeat_interleave(self.page_heads) for t in (source, target))
            head = torch.arange(self.page_heads).repeat(int(first.sum()))
        rows = source * self.host_stride + self.host_first + head
        kernels.copy_rows(self.host, rows, self.device, target * self.device_stride + head)

    def only(self, requests: Tensor) -> PageMoves:
        """The same for some of the requests (bool ``[R]``)."""
        return replace(self, index=self.index[requests], hot=self.hot[requests])


class ResidencyMap:
    """Hot-slot contents of all bounded requests, for the layers of one KV group.

    A request holds one *row* from :meth:`allocate` to :meth:`release`. Of a row's ``hot`` slots the request owns the
    first ``hot_of``; the rest stay ``EMPTY``, as does every slot of a free row.

    Not locked: one thread may write a layer while others work on other layers, but :meth:`allocate` and
    :meth:`release` need all of them to be at rest (they may replace the tensors).
    """

    def __init__(
        self, layers: int, heads: int, hot: int, capacity: int = 8, device: torch.device | str | None = None
    ) -> None:
        """``heads`` is the number of KV heads, or 1 when a layer has one set; ``hot`` the most slots of a request."""
        self.layers = layers
        self.heads = heads
        self.hot = hot
        shape = (layers, capacity, heads, hot)
        self.block = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
        """int32 ``[layers, capacity, heads, hot]``: logical block, or ``EMPTY``."""
        self.age = torch.zeros(shape, dtype=torch.int32, device=device)
        """int32, like ``block``: step in which that block was last selected."""
        self.hot_of = torch.zeros(capacity, dtype=torch.int32, device=device)
        """int32 ``[capacity]``: slots that the row's request owns; 0 in a free row."""
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """Rows there are, free ones included."""
        return int(self.hot_of.shape[0])

    @property
    def held(self) -> int:
        """Rows that requests hold."""
        return self.capacity - len(self._free)

    def allocate(self, hot: int | None = None) -> int:
        """Take a free row for a request with ``hot`` slots (all if None); doubles the capacity when none is free."""
        hot = self.hot if hot is None else hot
        if not 1 <= hot <= self.hot:
            raise ValueError(f"hot={hot} is not allowed: a request owns 1 to {self.hot} slots")
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.hot_of[row] = hot
        return row

    def release(self, slot: int) -> None:
        """Give row ``slot`` back and forget its contents."""
        if not self.hot_of[slot]:
            raise ValueError(f"row {slot} is not held")
        self.block[:, slot] = EMPTY
        self.age[:, slot] = 0
        self.hot_of[slot] = 0
        self._free.append(slot)

    def seed(self, layer: int, slots: Tensor, blocks: Tensor, step: int = 0) -> None:
        """Write the first set of blocks: int32 ``[R, heads, <= hot]`` for rows ``slots`` int64 ``[R]``."""
        self.block[layer, slots] = EMPTY
        self.block[layer, slots, :, : blocks.shape[2]] = blocks.int()
        self.age[layer, slots] = step

    def of(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(resident, age, hot_of)`` of rows ``slots``, as :func:`plan_swaps` takes them; copies."""
        return self.block[layer, slots], self.age[layer, slots], self.hot_of[slots]

    def apply(self, layer: int, plan: SwapPlan, moves: PageMoves | None = None) -> None:
        """Copy the pages of ``plan`` (None: nothing is to be copied), then enter its swaps."""
        block, age = self.block[layer], self.age[layer]
        if kernels.take(block, plan.incoming) and (moves is None or kernels.take(moves.host, moves.device)):
            kernels.enter_swaps(plan.rows, plan.incoming, plan.slot, plan.kept, block, age, plan.step, moves)
            return
        if moves is not None:
            moves.copy(plan)
        age[plan.rows] = torch.where(plan.kept, plan.step, age[plan.rows])
        request, head, swap = (plan.incoming != EMPTY).nonzero(as_tuple=True)
        where = (plan.rows[request], head, plan.slot[request, head, swap].long())
        block[where] = plan.incoming[request, head, swap]
        age[where] = plan.step

    def settle(self, row: int, holds: Tensor) -> Tensor:
        """Reorder a row's set, in all layers and heads, around what its slots hold already.

        A request becomes bounded: slot j physically holds logical block ``holds[j]`` (int ``[hot_of]``, ``EMPTY`` for
        nothing). Chosen blocks that are among them stay where they are; the others take the remaining slots, in order.

        Returns:
            bool ``[layers, heads, hot_of]``: slots whose page must be brought in.
        """
        hot = int(self.hot_of[row])
        chosen, age = self.block[:, row, :, :hot], self.age[:, row, :, :hot]
        same = chosen.unsqueeze(-1) == holds.to(chosen.dtype)  # [layers, heads, chosen, slot]
        same &= (chosen != EMPTY).unsqueeze(-1)
        at_home = same.any(-2)
        source = torch.empty_like(chosen, dtype=torch.int64)  # which of the chosen goes into each slot
        source.scatter_(-1, at_home.int().argsort(dim=-1, stable=True), same.any(-1).int().argsort(dim=-1, stable=True))
        source = torch.where(at_home, same.int().argmax(-2), source)
        self.block[:, row, :, :hot], self.age[:, row, :, :hot] = chosen.gather(-1, source), age.gather(-1, source)
        return ~at_home & (self.block[:, row, :, :hot] != EMPTY)

    def check_integrity(self, sinks: int, first_window_of_slot: Mapping[int, int]) -> None:
        """Check every row against the first window block of each held row.

        Raises:
            AssertionError: a held row is unknown to the caller (or the reverse), a block appears twice in a head's
                slots, is no middle block, or lies where nothing may.
        """
        held = {row for row in range(self.capacity) if self.hot_of[row]}
        assert held.isdisjoint(self._free) and len(held) + len(self._free) == self.capacity, (
            f"rows held {sorted(held)} and free {sorted(self._free)} do not make up {self.capacity}"
        )
        assert held == set(first_window_of_slot), (
            f"rows held {sorted(held)} are not those of running requests {sorted(first_window_of_slot)}"
        )
        first_window = torch.zeros(self.capacity, dtype=torch.int64)
        for row, window in first_window_of_slot.items():
            first_window[row] = window
        block = self.block.cpu().long()
        filled = block != EMPTY
        owned = torch.arange(self.hot) < self.hot_of.cpu().view(-1, 1, 1)
        self._refuse(filled & ~owned, "lies beyond the slots of its request")
        outside = (block < sinks) | (block >= first_window.view(1, -1, 1, 1))
        self._refuse(filled & outside, f"is not in [{sinks}, first window block)")
        ordered, order = block.sort(dim=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != EMPTY)
        again = torch.zeros_like(filled)
        again.scatter_(-1, order[..., 1:], twice)
        self._refuse(again, "appears twice")

    def _refuse(self, bad: Tensor, what: str) -> None:
        if bad.any():
            layer, row, head, slot = bad.nonzero()[0].tolist()
            block = int(self.block[layer, row, head, slot])
            raise AssertionError(f"layer {layer}, row {row}, head {head}, hot slot {slot}: block {block} {what}")

    def _grow(self) -> None:
        old = self.capacity
        self.block = torch.cat((self.block, torch.full_like(self.block, EMPTY)), dim=1)
        self.age = torch.cat((self.age, torch.zeros_like(self.age)), dim=1)
        self.hot_of = torch.cat((self.hot_of, torch.zeros_like(self.hot_of)))
        self._free.extend(range(2 * old - 1, old - 1, -1))
