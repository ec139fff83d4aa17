"""The host arena: exact size, every layer and head in its own place."""

from __future__ import annotations

import pytest
import torch

import oasiskv.tiers.host as host_module
from oasiskv.tiers.host import HostArena, LayerShape, as_pages, bytes_per_block

LAYERS = [
    LayerShape(heads=2, page_elements=64, dtype=torch.float32, page_summary_bytes=16),
    LayerShape(heads=2, page_elements=64, dtype=torch.float32, page_summary_bytes=16),
    LayerShape(heads=1, page_elements=96, dtype=torch.bfloat16, page_summary_bytes=28, outline_bytes=4),
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
        memory = torch.randint(0, 256, (5 * layer.summary_bytes,), dtype=torch.uint8, generator=generator)
        summaries.append(layer.store(5, memory))
    arena.join(pages, summaries)
    arena.save(host, device)
    back, stored = [torch.zeros_like(p) for p in pages], [layer.store(5) for layer in LAYERS]
    arena.join(back, stored)
    arena.restore(host, device)
    for i, layer in enumerate(LAYERS):
        rows = (device.view(-1, 1) * layer.heads + torch.arange(layer.heads)).view(-1)
        others = torch.ones(len(back[i]), dtype=torch.bool).index_fill(0, rows, False)
        assert torch.equal(back[i][rows], pages[i][rows]) and not back[i][others].any()
        for one, other in zip(stored[i].runs(), summaries[i].runs(), strict=True):
            assert torch.equal(one[:, device], other[:, device]) and not one[:, [1, 3]].any()
        one = torch.zeros_like(pages[i])
        arena.load(i, host, torch.zeros(3, dtype=torch.int64), one, device)
        assert torch.equal(one[device * layer.heads], pages[i][device * layer.heads])


def test_blocks_that_are_not_there_are_refused() -> None:
    arena = HostArena(7, LAYERS[:1])
    arena.join([torch.zeros(10, 32, dtype=torch.int64)], [LAYERS[0].store(5)])
    for host, device in ((7, 0), (-1, 0), (0, 5)):
        with pytest.raises(IndexError, match="out of range"):
            arena.save(torch.tensor([host]), torch.tensor([device]))
