"""The host tier of one rank: an arena of blocks in host memory, and the summaries that travel with them.

    arena     [host block] -> layer 0: head 0 page, head 1 page ... | layer 1: ...      one contiguous run per block
    summaries [layer] -> a store of opaque bytes of the scorer (oasiskv.core.summary_store)

One host block holds all layers and KV heads of one logical block, so that a block is one contiguous run of bytes for
the tiers below (layers with another page size, as a drafter may have, lie in a run of their own). A page is opaque:
its bytes are packed by the attention kernel and are moved whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.core.kernels import Planes, copy_rows, take
from oasiskv.core.residency import PageMoves
from oasiskv.core.summary_store import SummaryStore


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of one block.

    ``page_elements`` numbers of ``dtype`` are the K and V of one block for one of ``heads`` KV heads.
    ``page_summary_bytes`` is the size of one page's summary (0: the layer has none), ``outline_bytes`` of its outline.
    """

    heads: int
    page_elements: int
    dtype: torch.dtype
    page_summary_bytes: int
    outline_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_elements * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's pages in this layer."""
        return self.heads * self.page_bytes

    @property
    def summary_bytes(self) -> int:
        """Bytes of one block's summaries in this layer."""
        return self.heads * self.page_summary_bytes

    def store(self, blocks: int, memory: Tensor | None = None) -> SummaryStore:
        """Room for the summaries of ``blocks`` blocks, in ``memory`` uint8 ``[blocks * summary_bytes]`` if given."""
        if memory is None:
            memory = torch.zeros(blocks * self.summary_bytes, dtype=torch.uint8)
        return SummaryStore(memory, self.heads, blocks, self.page_summary_bytes, self.outline_bytes)


def bytes_per_block(layers: Sequence[LayerShape]) -> int:
    """Host bytes that one block takes, its pages and its summaries."""
    return sum(layer.block_bytes + layer.summary_bytes for layer in layers)


def as_pages(cache: Tensor, page_bytes: int) -> Tensor:
    """A contiguous cache as one row of int64 per page: whole rows are what ``index_select`` copies fastest."""
    return cache.view(-1).view(torch.int64).view(-1, page_bytes // 8)


class HostArena:
    """Pages and summaries of ``num_blocks`` blocks. Who has which block is the scheduler's business.

    ``summaries[l]`` are those of layer l. The memory is exactly ``num_blocks * bytes_per_block(layers)``, never rounded
    up.
    """

    def __init__(self, num_blocks: int, layers: Sequence[LayerShape]) -> None:
        self.num_blocks = num_blocks
        self.layers = tuple(layers)
        self._first: list[int] = []  # first page of each layer in its run
        counts: dict[int, int] = {}  # pages of one block in a run, by page size
        for layer in layers:
            self._first.append(counts.get(layer.page_bytes, 0))
            counts[layer.page_bytes] = self._first[-1] + layer.heads
        self._counts = counts
        self._pages = {
            size: torch.empty((num_blocks * count, size // 8), dtype=torch.int64) for size, count in counts.items()
        }
        self.summaries = [layer.store(num_blocks) for layer in layers]
        self._device: list[tuple[Tensor, SummaryStore]] = []
        self._planes: Planes | None = None

    def join(self, pages: Sequence[Tensor], summaries: Sequence[SummaryStore]) -> None:
        """Name the device's side, by layer: pages (see :func:`as_pages`), and summaries in a store like ours."""
        self._device = list(zip(pages, summaries, strict=True))
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, shape in enumerate(self.layers):
            first, words = self._first[i], shape.page_bytes // 8
            runs = self._pages[shape.page_bytes].view(self.num_blocks, self._counts[shape.page_bytes] * words)
            pairs.append(
                (pages[i].view(-1, shape.heads * words), runs[:, first * words : (first + shape.heads) * words])
            )
            if shape.summary_bytes:
                for here, there in self._runs(summaries[i], self.summaries[i]):
                    pairs += zip(here, there, strict=True)
        self._planes = Planes(pairs) if take(*(side for pair in pairs for side in pair)) else None

    def save(self, host: Tensor, device: Tensor) -> None:
        """Copy the blocks ``device`` int64 [n] of all layers, with their summaries, to the blocks ``host`` [n]."""
        if self._planes is not None:
            self._planes.copy(device, host)
            return
        for i, (pages, summaries) in enumerate(self._device):
            head = torch.arange(self.layers[i].heads)
            source = (device.view(-1, 1) * len(head) + head).view(-1)
            target = self._rows(i, host.view(-1, 1), head).view(-1)
            copy_rows(pages, source, self._pages[self.layers[i].page_bytes], target)
            for here, there in self._runs(summaries, self.summaries[i]):
                _copy_blocks(here, device, there, host)

    def restore(self, host: Tensor, device: Tensor) -> None:
        """The reverse of :meth:`save`."""
        if self._planes is not None:
            self._planes.copy(host, device, backwards=True)
            return
        for i, (pages, summaries) in enumerate(self._device):
            self.load(i, host, None, pages, device)
            for here, there in self._runs(summaries, self.summaries[i]):
                _copy_blocks(there, host, here, device)

    def load(self, layer: int, host: Tensor, head: Tensor | None, device_pages: Tensor, device: Tensor) -> None:
        """Copy pages of the blocks ``host`` int64 [n] to the blocks ``device`` [n]: KV head ``head`` [n], or all
        heads."""
        heads = self.layers[layer].heads
        if head is None:
            head = torch.arange(heads).repeat(len(host))
            host, device = host.repeat_interleave(heads), device.repeat_interleave(heads)
        arena = self._pages[self.layers[layer].page_bytes]
        copy_rows(arena, self._rows(layer, host, head), device_pages, device * heads + head)

    def moves(
        self, layer: int, index: Tensor, hot: Tensor, sinks: int, device_pages: Tensor, per_head: bool
    ) -> PageMoves:
        """What brings pages of the host blocks ``index`` [R, M] into the slots ``hot`` [R, H]; see there."""
        shape = self.layers[layer]
        return PageMoves(
            index=index,
            hot=hot,
            sinks=sinks,
            host=self._pages[shape.page_bytes],
            host_stride=self._counts[shape.page_bytes],
            host_first=self._first[layer],
            device=device_pages,
            device_stride=shape.heads,
            page_heads=None if per_head else shape.heads,
        )

    @staticmethod
    def _runs(device: SummaryStore, host: SummaryStore) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(device.runs(), host.runs(), strict=True)

    def _rows(self, layer: int, host: Tensor, head: Tensor) -> Tensor:
        count = self._counts[self.layers[layer].page_bytes]
        return host * count + (self._first[layer] + head)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(p.nbytes for p in self._pages.values()) + sum(s.memory.nbytes for s in self.summaries)


def _copy_blocks(source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
    target.index_copy_(1, target_blocks, source.index_select(1, source_blocks))
