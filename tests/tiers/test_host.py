"""The host arena: exact size, every layer and head in its own place."""

from __future__ import annotations

import pytest
import torch

import oasiskv.tiers.host as host_module
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


@pytest.mark.parametrize("compiled", [True, False])
def test_layers_and_heads_do_not_overwrite_one_another(compiled, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(host_module, "take", lambda *tensors: False)
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
    arena.join(pages, summaries)
    arena.save(host, device)
    back, stored = [torch.zeros_like(p) for p in pages], [torch.zeros_like(s) for s in summaries]
    arena.join(back, stored)
    arena.restore(host, device)
    for i, layer in enumerate(LAYERS):
        rows = (device.view(-1, 1) * layer.heads + torch.arange(layer.heads)).view(-1)
        others = torch.ones(len(back[i]), dtype=torch.bool).index_fill(0, rows, False)
        assert torch.equal(back[i][rows], pages[i][rows]) and not back[i][others].any()
        assert torch.equal(stored[i][:, device], summaries[i][:, device]) and not stored[i][:, [1, 3]].any()
        one = torch.zeros_like(pages[i])
        arena.load(i, host, torch.zeros(3, dtype=torch.int64), one, device)
        assert torch.equal(one[device * layer.heads], pages[i][device * layer.heads])


def test_blocks_that_are_not_there_are_refused() -> None:
    arena = HostArena(7, LAYERS[:1])
    pages, summaries = torch.zeros(10, 32, dtype=torch.int64), torch.zeros(2, 5, 2, 8, dtype=torch.uint8)
    arena.join([pages], [summaries])
    for host, device in ((7, 0), (-1, 0), (0, 5)):
        with pytest.raises(IndexError, match="out of range"):
            arena.save(torch.tensor([host]), torch.tensor([device]))
