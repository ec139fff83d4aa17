"""The compiled attention kernel beside its reference in torch."""

import pytest
import torch

from oasiskv.core import kernels
from oasiskv.core.decode_attention import DecodeAttention, DecodeBatch, is_for, reference

pytestmark = pytest.mark.skipif(not kernels.are_built(), reason="no compiler: vLLM's kernel does this work here")

NEWEST = (1, 5, 8, 0, 2)
SEEN = (1, 40, 1700, 0, 833)
"""Query tokens and context of five requests: short, with drafts, over several chunks, absent, over two chunks."""


def world(dtype: torch.dtype, dim: int, heads: int, group: int, size: int, newest=NEWEST, context=SEEN):
    """A cache whose unused pages are not numbers, a batch with its pages in any order, and strided queries."""
    dice = torch.Generator().manual_seed(0)
    pages = [-(-seen // size) for seen in context]
    blocks = sum(pages) + 3
    order = torch.randperm(blocks, generator=dice, dtype=torch.int32).split([*pages, 3])
    table = torch.zeros(len(context), max(pages), dtype=torch.int32)
    cache = torch.full((blocks, heads, size, 2 * dim), float("nan"), dtype=dtype)
    keys, values = cache.flatten(2).split(size * dim, dim=2)
    for r, (seen, own) in enumerate(zip(context, order, strict=False)):
        table[r, : len(own)] = own
        for page, block in enumerate(own.tolist()):
            held = min(size, seen - page * size)  # the rest of the last page was never written
            shape = (heads, size, dim)
            found = torch.randn(2, *shape, generator=dice)
            found[:, :, held:] = float("nan")
            keys[block] = found[0].transpose(1, 2).flatten(1).to(dtype)
            values[block] = found[1].flatten(1).to(dtype)
    starts = torch.tensor([0, *torch.tensor(newest).cumsum(0).tolist()], dtype=torch.int32)
    wide = torch.randn(sum(newest), (heads * group + 2) * dim, generator=dice).to(dtype)
    query = wide[:, : heads * group * dim].view(-1, heads * group, dim)
    return cache, starts, torch.tensor(context, dtype=torch.int32), table, query


@pytest.mark.parametrize("isa", range(kernels.best_isa() + 1))
@pytest.mark.parametrize(
    ("dim", "heads", "group", "size"), [(64, 2, 7, 32), (64, 3, 3, 128), (96, 1, 1, 64), (128, 2, 12, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_reference(isa, dim, heads, group, size, dtype) -> None:
    cache, starts, seen, table, query = world(dtype, dim, heads, group, size)
    exact = reference(cache, starts, seen, table, query, dim**-0.5)
    out = torch.empty_like(query)
    layer = DecodeAttention(cache, heads * group, dim**-0.5, isa)
    layer.attend(DecodeBatch(starts, seen, table), query, out)
    rounding = 1e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(out.float(), exact, rtol=rounding, atol=2e-6)


def test_a_chunk_that_only_the_last_token_sees() -> None:
    cache, starts, seen, table, query = world(torch.float32, 32, 1, 1, 32, newest=(2,), context=(18_433,))
    out = torch.empty_like(query)
    DecodeAttention(cache, 1, 0.25).attend(DecodeBatch(starts, seen, table), query, out)
    torch.testing.assert_close(out, reference(cache, starts, seen, table, query, 0.25), rtol=1e-5, atol=2e-6)


def test_is_the_same_to_the_bit_for_any_number_of_threads() -> None:
    cache, starts, seen, table, query = world(torch.bfloat16, 64, 2, 7, 32)
    layer, batch = DecodeAttention(cache, 14, 0.125), DecodeBatch(starts, seen, table)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(torch.empty_like(query))
            layer.attend(batch, query, found[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_far_logits_neither_overflow_nor_vanish() -> None:
    cache, starts, seen, table, query = world(torch.float32, 64, 2, 7, 32)
    query *= 300
    out = torch.empty_like(query)
    DecodeAttention(cache, 14, 0.125).attend(DecodeBatch(starts, seen, table), query, out)
    torch.testing.assert_close(out, reference(cache, starts, seen, table, query, 0.125), rtol=1e-4, atol=1e-4)


def test_a_table_can_be_replaced() -> None:
    cache, starts, seen, table, query = world(torch.float32, 64, 2, 7, 32)
    batch, other = DecodeBatch(starts, seen, torch.zeros_like(table)), torch.empty_like(query)
    batch.use(table)
    DecodeAttention(cache, 14, 0.125).attend(batch, query, other)
    torch.testing.assert_close(other, reference(cache, starts, seen, table, query, 0.125), rtol=1e-5, atol=2e-6)


def test_refuses_what_is_not_there() -> None:
    cache, starts, seen, table, query = world(torch.bfloat16, 64, 2, 7, 32)
    layer, out = DecodeAttention(cache, 14, 0.125), torch.empty_like(query)
    far, negative = table.clone(), table.clone()
    far[2, 1], negative[4, 0] = len(cache), -1
    for batch in (
        DecodeBatch(starts, seen, far),
        DecodeBatch(starts, seen, negative),
        DecodeBatch(starts, seen, table[:, :20]),
        DecodeBatch(starts + 1, seen, table),
        DecodeBatch(starts, seen - 1, table),
    ):
        with pytest.raises(IndexError, match="out of range"):
            layer.attend(batch, query, out)
    for wrong in (query.float(), query[:, :7], query[..., :32]):
        with pytest.raises(ValueError, match="does not fit"):
            layer.attend(DecodeBatch(starts, seen, table), wrong, out)


def test_says_which_caches_it_can_read() -> None:
    assert is_for(torch.zeros(2, 1, 32, 128, dtype=torch.bfloat16)) and is_for(torch.zeros(2, 1, 64, 64))
    assert not is_for(torch.zeros(2, 1, 16, 128)) and not is_for(torch.zeros(2, 1, 32, 80))
    assert not is_for(torch.zeros(2, 1, 32, 128, dtype=torch.float16))
    assert not is_for(torch.zeros(2, 2, 32, 128)[:, :1])
