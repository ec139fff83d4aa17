"""Attention of the newest tokens of each request over the pages in its table: a compiled kernel for CPUs.

A page holds ``size`` tokens of one KV head as vLLM's `vec` kernels lay it out: keys channel by channel, ``[D, size]``,
then values token by token (``[size, D]``). A table may name pages in any order, as long as the newest tokens lie in its
last ones: the i-th of a request's n tokens sees all but the n - 1 - i after it.

What is decoded is bound by reading pages. vLLM's kernel is made for long runs of query tokens too; this one only for a
few of them, and asks for each page before it needs it. Both accumulate in float32.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from oasiskv.core import kernels, native

MOST_TOKENS = 8
"""Query tokens of a request up to which the kernel is the faster one."""
PIECE = 32
"""Tokens, and channels, that the kernel reads at once: a page's size and D are multiples of it."""
_FORMATS = (torch.float32, torch.bfloat16)


class DecodeBatch:
    """The requests of a step, prepared once for all layers."""

    def __init__(self, starts: Tensor, seq_lens: Tensor, table: Tensor) -> None:
        """
        Args:
            starts: int32 ``[R + 1]``: first token of each request, and the end of the last.
            seq_lens: int32 ``[R]``: tokens that the newest of each sees, itself included.
            table: int32 ``[R, M]``: pages (blocks) in order.
        """
        assert starts.dtype == seq_lens.dtype == torch.int32 and len(starts) == len(seq_lens) + 1
        self.starts, self.seq_lens = starts.contiguous(), seq_lens.contiguous()
        self.structure: Any = kernels.filled(
            native.AttentionBatch, {"starts": self.starts, "seq_lens": self.seq_lens, "requests": len(seq_lens)}
        )
        self.use(table)

    def use(self, table: Tensor) -> None:
        """Attend over the pages of this table from now on."""
        assert table.dtype == torch.int32 and len(table) == len(self.seq_lens)
        self.table = table.contiguous()
        self.structure.table, self.structure.columns = self.table.data_ptr(), table.shape[1]


class DecodeAttention:
    """One layer's attention, prepared once: a step only names its batch, its queries and where the result goes."""

    def __init__(self, cache: Tensor, query_heads: int, scale: float, isa: int | None = None) -> None:
        """
        Args:
            cache: float32 or bfloat16 ``[blocks, KV heads, size, 2 D]``, whose last two dimensions are a page's bytes.
            query_heads: a multiple of the KV heads.
            scale: the softmax scale.
            isa: index in ``kernels.ISAS``; the best if None.
        """
        blocks, heads, size, width = cache.shape
        assert is_for(cache) and query_heads % heads == 0
        self._cache, self._tail = cache, (query_heads, width // 2)
        self._structure: Any = kernels.filled(
            native.AttentionLayer,
            {
                "cache": cache,
                "format": kernels.FORMATS[cache.dtype],
                "blocks": blocks,
                "heads": heads,
                "size": size,
                "dim": width // 2,
                "group": query_heads // heads,
                "scale": scale,
                "isa": kernels.best_isa() if isa is None else isa,
            },
        )
        library = kernels.library()
        assert library is not None
        self._kernel = library.oasis_decode_attention

    def attend(self, batch: DecodeBatch, query: Tensor, out: Tensor) -> None:
        """Write attention of ``query`` to ``out``, both ``[tokens, query heads, D]`` in the cache's format.

        Raises:
            ValueError: a tensor of another format or shape.
            IndexError: the batch names a page or a token that is not there.
        """
        layer = self._structure
        for tensor in (query, out):
            fits = tensor.shape[1:] == self._tail and tensor[:1].is_contiguous()
            if tensor.dtype is not self._cache.dtype or not fits:
                raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} does not fit a layer of {self._tail}")
        layer.query, layer.query_stride = query.data_ptr(), query.stride(0)
        layer.out, layer.out_stride, layer.tokens = out.data_ptr(), out.stride(0), min(len(query), len(out))
        if not self._kernel(ctypes.byref(batch.structure), ctypes.byref(layer)):
            raise IndexError(f"oasis_decode_attention: {kernels.OUT_OF_RANGE}")


def is_for(cache: Tensor) -> bool:
    """Whether the kernel can read this cache ``[blocks, KV heads, size, 2 D]``, its pages being as it wants them."""
    _, _, size, width = cache.shape
    fits = cache.dtype in _FORMATS and size % PIECE == 0 and width % (2 * PIECE) == 0 and cache.is_contiguous()
    return fits and kernels.take(cache)


def reference(cache: Tensor, starts: Tensor, seq_lens: Tensor, table: Tensor, query: Tensor, scale: float) -> Tensor:
    """What :meth:`DecodeAttention.attend` writes, in torch and float32: ``[tokens, query heads, D]``."""
    _, heads, size, width = cache.shape
    dim = width // 2
    out = torch.zeros(query.shape, dtype=torch.float32)
    for r, seen in enumerate(seq_lens.tolist()):
        begin, end = starts[r : r + 2].tolist()
        pages = cache[table[r, : -(-seen // size)].long()].transpose(0, 1).flatten(2).float()  # [heads, pages, numbers]
        keys, values = pages.split(size * dim, dim=-1)
        keys = keys.unflatten(-1, (dim, size)).transpose(-1, -2).flatten(1, 2)[:, :seen]
        values = values.unflatten(-1, (size, dim)).flatten(1, 2)[:, :seen]
        rows = query[begin:end].float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [heads, group, tokens, D]
        logits = rows @ keys.transpose(1, 2).unsqueeze(1) * scale
        last = seen - (end - begin) + torch.arange(end - begin).view(-1, 1)
        logits = logits.masked_fill(torch.arange(seen) > last, float("-inf"))
        out[begin:end] = (logits.softmax(-1) @ values.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
    return out
