"""Where one layer's summaries lie: the outlines of all pages in one run of memory, what else there is in another.

A scorer with outlines judges every page by its outline and few pages by more, so the outlines lie side by side: to read
all of them is a plain walk through memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SummaryStore:
    """Summaries of ``blocks`` blocks for each of ``heads`` KV heads, in memory that the caller owns."""

    outlines: Tensor
    """uint8 ``[heads, blocks, outline_bytes]``: the first bytes of each summary."""
    bodies: Tensor
    """uint8 ``[heads, blocks, page_bytes - outline_bytes]``: the others."""

    def __init__(self, memory: Tensor, heads: int, blocks: int, page_bytes: int, outline_bytes: int) -> None:
        """``memory``: uint8 ``[heads * blocks * page_bytes]``, aligned to 4 bytes; sizes in bytes, multiples of 4."""
        first = heads * blocks * outline_bytes
        self.memory = memory
        self.outlines = memory[:first].view(heads, blocks, outline_bytes)
        self.bodies = memory[first:].view(heads, blocks, page_bytes - outline_bytes)

    @classmethod
    def zeros(cls, heads: int, blocks: int, page_bytes: int, outline_bytes: int) -> SummaryStore:
        """In memory of its own."""
        memory = torch.zeros(heads * blocks * page_bytes, dtype=torch.uint8)
        return cls(memory, heads, blocks, page_bytes, outline_bytes)

    def put(self, blocks: Tensor, summaries: Tensor) -> None:
        """Enter the blocks int64 ``[n]``: ``summaries`` uint8 ``[n, heads, page_bytes]``, as scorers make them."""
        outlines, bodies = summaries.transpose(0, 1).tensor_split((self.outlines.shape[2],), dim=2)
        self.outlines[:, blocks] = outlines
        self.bodies[:, blocks] = bodies

    def get(self, blocks: Tensor) -> Tensor:
        """Whole summaries of the blocks int64 ``[n]``: uint8 ``[heads, n, page_bytes]``."""
        found = [run.index_select(1, blocks).view(torch.uint8) for run in self.runs()]
        return torch.cat(found, dim=2)

    def runs(self) -> list[Tensor]:
        """All there is of each block: int32 tensors ``[heads, blocks, words]``. (Rows of words are copied 30 times as
        fast as rows of bytes.)"""
        return [run.view(torch.int32) for run in (self.outlines, self.bodies) if run.shape[2]]
