"""The host arena: exact size, every layer and head in its own place."""

from __future__ import annotations

import torch

from oasiskv.tiers.host import HostArena, LayerShape, as_pages, bytes_per_block

LAYERS = [
    LayerShape(heads=2, page_elements=64, dtype=torch.float32, parts=2, part_bytes=8),
    LayerShape(heads=2, page_elements=64, dtype=torch.float32, parts=2, part_bytes=8),
    LayerShape(heads=1, page_elements=96, dtype=torch.bfloat16, parts=2, part_bytes=12),
]


def test_its_memory_is_exactly_that_of_its_blocks() -> None:
    """Not the next power of two."""
    for blocks in (1, 33, 1000):
        assert HostArena(blocks, LAYERS).nbytes == blocks * bytes_per_block(LAYERS)


def test_layers_and_heads_do_not_overwrite_one_another() -> None:
    arena = HostArena(7, LAYERS)
    device = torch.tensor([4, 0, 2])
    host = torch.tensor([6, 3, 0])
    pages, summaries = [], []
    for i, layer in enumerate(LAYERS):
        generator = torch.Generator().manual_seed(i)
        raw = torch.randint(0, 256, (5 * layer.block_bytes,), dtype=torch.uint8, generator=generator)
        pages.append(as_pages(raw, layer.page_bytes))
        store = torch.randint(0, 256, (layer.heads, 5, 2, layer.part_bytes), dtype=torch.uint8, generator=generator)
        summaries.append(store)
    for i in range(len(LAYERS)):
        arena.store(i, host, pages[i], device)
        arena.store_summaries(i, host, summaries[i], device)
    for i, layer in enumerate(LAYERS):
        back, stored = torch.zeros_like(pages[i]), torch.zeros_like(summaries[i])
        arena.load(i, host, None, back, device)
        arena.load_summaries(i, host, stored, device)
        rows = (device.view(-1, 1) * layer.heads + torch.arange(layer.heads)).view(-1)
        assert torch.equal(back[rows], pages[i][rows])
        assert torch.equal(stored[:, device], summaries[i][:, device])
        one = torch.zeros_like(pages[i])
        arena.load(i, host, torch.zeros(3, dtype=torch.int64), one, device)
        assert torch.equal(one[device * layer.heads], pages[i][device * layer.heads])
