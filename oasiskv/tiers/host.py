"""The host tier of one rank: an arena of blocks in host memory, and the summaries that travel with them.

    arena     [host block] -> layer 0: head 0 page, head 1 page ... | layer 1: ...      one contiguous run per block
    summaries [layer][KV head, host block, part] -> opaque bytes of the scorer

One host block holds all layers and KV heads of one logical block, so that a block is one contiguous run of bytes for
the tiers below. A page is opaque: its bytes are packed by the attention kernel and are moved whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of one block.

    ``page_elements`` numbers of ``dtype`` are the K and V of one block for one of ``heads`` KV heads.
    ``part_bytes`` is the size of one summary (0: the layer has none).
    """

    heads: int
    page_elements: int
    dtype: torch.dtype
    parts: int
    part_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's pages in this layer."""
        return self.heads * self.page_elements * self.dtype.itemsize

    @property
    def summary_bytes(self) -> int:
        """Bytes of one block's summaries in this layer."""
        return self.heads * self.parts * self.part_bytes


def bytes_per_block(layers: Sequence[LayerShape]) -> int:
    """Host bytes that one block takes, its pages and its summaries."""
    return sum(layer.block_bytes + layer.summary_bytes for layer in layers)


class HostArena:
    """Pages and summaries of ``num_blocks`` blocks. Who has which block is the scheduler's business.

    ``pages[l]`` is a view ``[num_blocks, heads, page_elements]``; ``summaries[l]`` is ``[heads, num_blocks, parts,
    part_bytes]`` of uint8. The memory is exactly ``num_blocks * bytes_per_block(layers)``, never rounded up.
    """

    def __init__(self, num_blocks: int, layers: Sequence[LayerShape]) -> None:
        self.num_blocks = num_blocks
        run = sum(layer.block_bytes for layer in layers)
        self._bytes = torch.empty((num_blocks, run), dtype=torch.uint8)
        self.pages: list[Tensor] = []
        self.summaries: list[Tensor] = []
        offset = 0
        for layer in layers:
            flat = self._bytes[:, offset : offset + layer.block_bytes].view(layer.dtype)
            self.pages.append(flat.unflatten(1, (layer.heads, layer.page_elements)))
            self.summaries.append(
                torch.zeros((layer.heads, num_blocks, layer.parts, layer.part_bytes), dtype=torch.uint8)
            )
            offset += layer.block_bytes

    def store(self, layer: int, host: Tensor, device_pages: Tensor, device: Tensor) -> None:
        """Copy the blocks ``device`` [n] of ``device_pages`` [blocks, heads, page_elements] to ``host`` [n]."""
        self.pages[layer][host] = device_pages[device]

    def load(self, layer: int, host: Tensor, heads: Tensor | None, device_pages: Tensor, device: Tensor) -> None:
        """Copy pages ``host`` [n] to the device blocks ``device`` [n], of one KV head each (``heads`` [n]) or of
        all."""
        if heads is None:
            device_pages[device] = self.pages[layer][host]
        else:
            device_pages[device, heads] = self.pages[layer][host, heads]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes.nbytes + sum(s.nbytes for s in self.summaries)
