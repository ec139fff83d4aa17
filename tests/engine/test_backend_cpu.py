"""Which kernel a layer's attention gets, and that both read the same pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops

from oasiskv.core import kernels
from oasiskv.core.decode_attention import DecodeAttention, DecodeBatch
from oasiskv.vllm_plugin.backend_cpu import OasisCPUImpl

pytestmark = pytest.mark.skipif(not kernels.are_built(), reason="no compiler: vLLM's kernel does all the work here")

HEADS, GROUP, SIZE, DIM = 2, 3, 32, 64


def decoder(
    dtype: torch.dtype = torch.float32, isa: str = "vec", size: int = SIZE, dim: int = DIM, **changed: Any
) -> Any:
    """What a layer of this kind decodes with."""
    implementation = OasisCPUImpl.__new__(OasisCPUImpl)
    plain = {"logits_soft_cap": 0.0, "sinks": None, "scale": dim**-0.5, "_decoders": {}}
    implementation.__dict__.update(plain | changed)
    cache = torch.zeros(4, HEADS, size, 2 * dim, dtype=dtype)
    query = torch.zeros(1, HEADS * GROUP, dim, dtype=changed.get("query_dtype", dtype))
    return implementation._decode(SimpleNamespace(isa=isa), cache, query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_layer_gets_our_kernel(dtype: torch.dtype) -> None:
    assert isinstance(decoder(dtype), DecodeAttention)


@pytest.mark.parametrize(
    "other",
    [
        {"logits_soft_cap": 30.0},
        {"sinks": torch.zeros(HEADS * GROUP)},
        {"dtype": torch.float16},
        {"dtype": torch.uint8, "query_dtype": torch.bfloat16},
        {"query_dtype": torch.bfloat16},
        {"isa": "amx"},
        {"isa": "vec16"},
        {"size": 16},
        {"dim": 80},
    ],
    ids=lambda other: ",".join(other),
)
def test_what_ours_cannot_do_is_left_to_vllms(other: dict[str, Any]) -> None:
    assert decoder(**other) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "dim"), [(32, 64), (128, 128), (64, 96)])
def test_pages_that_vllm_wrote_mean_the_same_to_both(size: int, dim: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice).to(dtype)

    seen, newest, blocks = torch.tensor([1, 700, 131], dtype=torch.int32), [1, 1, 4], 60
    starts = torch.tensor([0, 1, 2, 6], dtype=torch.int32)
    table = torch.randint(blocks, (3, -(-700 // size)), generator=dice, dtype=torch.int32)
    cache = torch.zeros(blocks, HEADS, size, 2 * dim, dtype=dtype)
    halves = cache.view(blocks, HEADS, 2 * size, dim).chunk(2, dim=2)
    for r, length in enumerate(seen.tolist()):
        tokens = torch.arange(length)
        slots = table[r, tokens // size].long() * size + tokens % size
        ops.cpu_attn_reshape_and_cache(noise(length, HEADS, dim), noise(length, HEADS, dim), *halves, slots, "vec")
    query = noise(sum(newest), HEADS * GROUP, dim)
    ours, stock = torch.empty_like(query), torch.empty_like(query)
    DecodeAttention(cache, HEADS * GROUP, dim**-0.5).attend(DecodeBatch(starts, seen, table), query, ours)
    scheduler = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=3,
        num_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=dim,
        seq_lens=seen,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=halves[0],
        value_cache=halves[1],
        output=stock,
        query_start_loc=starts,
        seq_lens=seen,
        scale=dim**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=scheduler,
        s_aux=None,
    )
    assert stock.abs().max() > 0.5
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-6 if dtype is torch.float32 else 2**-7)
