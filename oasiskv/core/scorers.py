"""Scorers: how much softmax mass will a page hold, estimated from a small summary instead of its keys?

A page is cut into parts of ``PART_TOKENS`` tokens. A scorer turns a page's keys (after RoPE) into ``page_bytes`` opaque
bytes per KV head, so that one store holds the summaries of any scorer, and estimates the log of the softmax mass
from them, up to a constant common to all pages: ``logsumexp`` over the page's parts of ``estimate * scale``. The first
bytes of a summary may be an *outline*, by which most pages are judged (:mod:`oasiskv.core.page_scores`).

A new scorer is one class here with one line in ``SCORERS``. ``oracle`` and ``random`` are for measuring only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from oasiskv.core import kernels
from oasiskv.core.settings import PART_TOKENS
from oasiskv.core.summary_store import SummaryStore

_COMPILED_KEYS = (torch.float32, torch.bfloat16)
"""Number formats of keys and queries that the compiled kernels take."""
_CHANNELS_PER_WORD = 16
"""2-bit codes of a 32-bit word."""
SUMMARY_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class Scorer(ABC):
    """Makes summaries of pages and estimates page scores from them. Stateless, except for ``random``."""

    name: ClassVar[str]
    coarse: Scorer | None = None
    """A coarser scorer, to which an outline is the summary of a page of one part; None: there are no outlines."""
    outline_bytes: int = 0
    """Bytes of a page's outline for one KV head; all sizes are multiples of 4, so that a view as float32 is aligned."""

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        """``dtype`` is the number format of the summary: float32, bfloat16 or int8 (one float32 scale per part).

        Raises:
            ValueError: ``head_dim`` is no multiple of 4, or ``dtype`` is none of the three.
        """
        if head_dim <= 0 or head_dim % 4:
            raise ValueError(f"head_dim={head_dim} is not allowed: it must be a multiple of 4")
        if dtype not in SUMMARY_DTYPES:
            raise ValueError(f"summary dtype {dtype} is not allowed: use float32, bfloat16 or int8")
        self.head_dim = head_dim
        self.dtype = dtype

    @abstractmethod
    def page_bytes(self, parts: int) -> int:
        """Bytes that summarise a page of so many parts for one KV head, its outline included."""

    @abstractmethod
    def summarise(self, keys: Tensor) -> Tensor:
        """Keys of pages ``[n, tokens, Hkv, D]`` after RoPE, in any float format -> uint8 ``[n, Hkv, page_bytes]``."""

    def compiled(self, store: SummaryStore, key_dtype: torch.dtype) -> kernels.TwoBitLayer | None:
        """What writes the steps' keys into ``store`` in one call each, if there is such a kernel; else
        :meth:`summarise` makes what is written."""
        return None

    @abstractmethod
    def estimate(self, queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
        """Estimated logits of a page's units: its parts, or its tokens where the summary tells them apart.

        Args:
            queries: float ``[B, Q, D]``, after RoPE; B runs over (request, KV head), Q over its rows and query heads.
            summaries: uint8 ``[B, M, page_bytes]``: M pages.
            scale: the softmax scale, usually ``D ** -0.5``.

        Returns:
            float32 ``[B, Q, M, units]``.
        """

    def score(self, queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
        """Estimated log of the (unnormalised) softmax mass that each query gives to each page: float32 ``[B, Q, M]``.

        Arguments as for :meth:`estimate`.
        """
        return self.estimate(queries, summaries, scale).logsumexp(-1)


class LinearScorer(Scorer):
    """A scorer whose estimate is one dot product of a widened query with ``width * D`` numbers per part."""

    width: ClassVar[int]

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(head_dim, dtype)
        self.part_bytes = encoded_bytes(self.width * head_dim, dtype)

    def page_bytes(self, parts: int) -> int:
        return parts * self.part_bytes

    @abstractmethod
    def reduce(self, keys: Tensor) -> Tensor:
        """Float32 keys ``[n, PART_TOKENS, Hkv, D]`` -> float32 ``[n, Hkv, width * D]``."""

    @abstractmethod
    def widen(self, queries: Tensor) -> Tensor:
        """Float32 queries ``[B, Q, D]`` -> ``[B, Q, width * D]``."""

    def summarise(self, keys: Tensor) -> Tensor:
        parts = keys.unflatten(1, (-1, PART_TOKENS))
        stored = encode(self.reduce(parts.flatten(0, 1).float()), self.dtype)
        return stored.unflatten(0, parts.shape[:2]).transpose(1, 2).flatten(2)

    def estimate(self, queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
        parts = summaries.unflatten(2, (-1, self.part_bytes)).flatten(1, 2)
        values, part_scale = decode(parts, self.dtype)
        estimate = products(self.widen(queries.float() * scale), values)
        if part_scale is not None:
            estimate = estimate * part_scale.unsqueeze(1)
        return per_page(estimate, summaries.shape[1])


class BoxScorer(LinearScorer):
    """Centre c and half-width h of the part's box of keys: ``q.c + 0.5 |q|.h``.

    Half of Quest's bound: as large, and better or equal on every model and text measured (the study, section 2b).
    """

    name = "box"
    width = 2
    reach: ClassVar[float] = 0.5

    def reduce(self, keys: Tensor) -> Tensor:
        low, high = keys.amin(1), keys.amax(1)
        return torch.cat(((high + low) * 0.5, (high - low) * 0.5), dim=-1)

    def widen(self, queries: Tensor) -> Tensor:
        return torch.cat((queries, queries.abs() * self.reach), dim=-1)


class MinMaxScorer(BoxScorer):
    """``q.c + |q|.h``, which is Quest's ``sum_d max(q_d min_d, q_d max_d)``: a true upper bound in float32.

    Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (2024).
    """

    name = "minmax"
    reach = 1.0


class MeanScorer(LinearScorer):
    """The mean key of the part: ``q.mean``. Half the size of ``box``."""

    name = "mean"
    width = 1

    def reduce(self, keys: Tensor) -> Tensor:
        return keys.mean(1)

    def widen(self, queries: Tensor) -> Tensor:
        return queries


class TwoBitScorer(Scorer):
    """Keys at 2 bits per channel between their part's own minimum and maximum; the score is a logsumexp over tokens.

    Bytes of a page::

        outline            | c and h, as in ``box``, of the whole page |
        each of its parts  | low and high: uint8 [2, D] | codes: uint32 [D / 16, PART_TOKENS] |

    where low and high say in 255ths between which bounds of the outline the part's keys lie (a page of one part has
    none: they would be 0 and 255), bits 2k and 2k + 1 of word (g, t) hold channel 16 g + k of token t, and D is rounded
    up to a multiple of 16. Nearly an oracle at about an eighth of the KV's bytes.
    """

    name = "q2"
    coarse: BoxScorer

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(head_dim, dtype)
        self.coarse = BoxScorer(head_dim, dtype)
        self.outline_bytes = self.coarse.part_bytes
        self._words = -(-head_dim // _CHANNELS_PER_WORD)
        self._code_bytes = 4 * self._words * PART_TOKENS

    def page_bytes(self, parts: int) -> int:
        bounds = 2 * self.head_dim if parts > 1 else 0
        return self.outline_bytes + parts * (bounds + self._code_bytes)

    def summarise(self, keys: Tensor) -> Tensor:
        keys = keys.float().unflatten(1, (-1, PART_TOKENS)).transpose(1, 3)  # [n, heads, PART_TOKENS, parts, D]
        low, high = keys.amin(2), keys.amax(2)
        lowest, highest = low.amin(2), high.amax(2)
        outline = encode(torch.cat(((highest + lowest) * 0.5, (highest - lowest) * 0.5), dim=-1), self.dtype)
        base, half = self._read(outline)  # as stored, so that bounds and codes make up for its rounding
        bounds = None
        if keys.shape[3] > 1:
            found = (torch.stack((low, high), 3) - base[:, :, None, None]) / _level(half)[:, :, None, None]
            bounds = found.round().clamp(0, 255).to(torch.uint8)  # [n, heads, parts, 2, D]
        first, step = _scale(base, half, bounds)
        step = step.clamp_min(torch.finfo(torch.float32).tiny)
        code = ((keys - first.unsqueeze(2)) / step.unsqueeze(2)).round().clamp(0, 3).to(torch.int32)
        code = torch.nn.functional.pad(code, (0, self._words * _CHANNELS_PER_WORD - self.head_dim))
        code = code.unflatten(-1, (self._words, _CHANNELS_PER_WORD)) << _shifts(keys.device)
        packed = code.sum(-1, dtype=torch.int32).permute(0, 1, 3, 4, 2)  # no two codes share a bit
        body = packed.contiguous().view(torch.uint8).flatten(3)  # [n, heads, parts, words of all tokens]
        if bounds is not None:
            body = torch.cat((bounds.flatten(3), body), dim=-1)
        return torch.cat((outline, body.flatten(2)), dim=-1)

    def compiled(self, store: SummaryStore, key_dtype: torch.dtype) -> kernels.TwoBitLayer | None:
        fits = self.head_dim <= kernels.MOST_DIM and key_dtype in _COMPILED_KEYS
        if not fits or not kernels.take(store.memory):
            return None
        return kernels.TwoBitLayer(store, self.head_dim, key_dtype, self.dtype)

    def estimate(self, queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
        keys = self.keys(summaries).flatten(1, 2)
        return per_page(products(queries.float() * scale, keys), summaries.shape[1])

    def keys(self, summaries: Tensor) -> Tensor:
        """Summaries uint8 ``[..., page_bytes]`` -> keys ``[..., tokens, D]``, in bfloat16 unless float32."""
        outline, body = summaries.tensor_split((self.outline_bytes,), dim=-1)
        base, half = self._read(outline)
        bounds = None
        if body.shape[-1] != self._code_bytes:
            body = body.unflatten(-1, (-1, 2 * self.head_dim + self._code_bytes))
            bounds, body = body.tensor_split((2 * self.head_dim,), dim=-1)
            bounds = bounds.unflatten(-1, (2, self.head_dim))
        else:
            body = body.unsqueeze(-2)
        words = _view(body, torch.int32).unflatten(-1, (self._words, PART_TOKENS)).transpose(-1, -2)
        code = (words.unsqueeze(-1) >> _shifts(words.device)) & 3
        code = code.flatten(-2)[..., : self.head_dim]
        held = torch.float32 if self.dtype is torch.float32 else torch.bfloat16
        first, step = ((part.to(held).unsqueeze(-2)) for part in _scale(base, half, bounds))
        return torch.addcmul(first, step, code.to(held)).flatten(-3, -2)

    def _read(self, outline: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bound and half-width ``[..., D]`` of stored outlines."""
        values, scale = decode(outline, self.dtype)
        values = values.float() if scale is None else values.float() * scale.unsqueeze(-1)
        centre, half = values.chunk(2, dim=-1)
        return centre - half, half


class OracleScorer(Scorer):
    """The keys themselves and the exact logsumexp: what a perfect scorer would say. For measuring only.

    Keys are held in float32, or in bfloat16 if the summaries are bfloat16 or int8.
    """

    name = "oracle"

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(head_dim, dtype)
        self._held = torch.float32 if dtype is torch.float32 else torch.bfloat16

    def page_bytes(self, parts: int) -> int:
        return encoded_bytes(parts * PART_TOKENS * self.head_dim, self._held)

    def summarise(self, keys: Tensor) -> Tensor:
        return encode(keys.transpose(1, 2).flatten(2), self._held)

    def estimate(self, queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
        values, _ = decode(summaries, self._held)
        keys = values.reshape(summaries.shape[0], -1, self.head_dim)
        return per_page(products(queries.float() * scale, keys), summaries.shape[1])


class RandomScorer(Scorer):
    """Uniform random scores from a generator of its own: the floor of every table. For measuring only."""

    name = "random"

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(head_dim, dtype)
        self._generator = torch.Generator().manual_seed(0)

    def page_bytes(self, parts: int) -> int:
        return 4 * parts

    def summarise(self, keys: Tensor) -> Tensor:
        size = self.page_bytes(keys.shape[1] // PART_TOKENS)
        return torch.zeros(keys.shape[0], keys.shape[2], size, dtype=torch.uint8, device=keys.device)

    def estimate(self, queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
        shape = (queries.shape[0], queries.shape[1], summaries.shape[1], 1)
        return torch.rand(shape, generator=self._generator).to(queries.device)


SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer for scorer in (BoxScorer, MinMaxScorer, MeanScorer, TwoBitScorer, OracleScorer, RandomScorer)
}


def make_scorer(name: str, head_dim: int, dtype: torch.dtype) -> Scorer:
    """Build the scorer called ``name``.

    Raises:
        ValueError: there is none of that name, or ``head_dim`` or ``dtype`` is not allowed.
    """
    if name not in SCORERS:
        raise ValueError(f"scorer={name!r} is not allowed: use one of {', '.join(sorted(SCORERS))}")
    return SCORERS[name](head_dim, dtype)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 2 * _CHANNELS_PER_WORD, 2, dtype=torch.int32, device=device)


def _level(half: Tensor) -> Tensor:
    """A 255th of an outline's width."""
    return (half * (2 / 255)).clamp_min(torch.finfo(torch.float32).tiny)


def _scale(base: Tensor, half: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """What code 0 stands for, and the step to the next code: ``[..., parts, D]`` from an outline's ``[..., D]`` and its
    parts' bounds uint8 ``[..., parts, 2, D]`` (None: the outline's own)."""
    base, half = base.unsqueeze(-2), half.unsqueeze(-2)
    if bounds is None:
        return base, half * (2 / 3)
    low, high = bounds.float().unbind(-2)
    level = _level(half)
    return base + level * low, (level * (1 / 3)) * (high - low)


def encoded_bytes(count: int, dtype: torch.dtype) -> int:
    """Bytes of ``count`` numbers in ``dtype``; int8 has a float32 scale before them."""
    return 4 + count if dtype is torch.int8 else count * dtype.itemsize


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float numbers ``[..., count]`` -> uint8 ``[..., encoded_bytes]``."""
    if dtype is not torch.int8:
        return values.to(dtype).contiguous().view(torch.uint8)
    values = values.float()
    scale = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    whole = (values / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), whole.view(torch.uint8)), dim=-1)


def decode(stored: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Undo :func:`encode`: uint8 ``[..., bytes]`` -> numbers ``[..., count]`` and, for int8, their scale ``[...]``.

    The numbers of an int8 summary come back in bfloat16 (which holds them exactly) and still need the scale.
    """
    if dtype is not torch.int8:
        return _view(stored, dtype), None
    return stored[..., 4:].view(torch.int8).bfloat16(), _view(stored[..., :4], torch.float32).squeeze(-1)


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Queries float32 ``[B, Q, K]`` times keys ``[B, N, K]`` in the keys' format -> float32 ``[B, Q, N]``.

    In bfloat16 the product is rounded to bfloat16 too (2 to 3 digits): far below a summary's own error, and 5 times
    as fast on a CPU as widening the summaries first.
    """
    return torch.bmm(queries.to(keys.dtype), keys.transpose(1, 2)).float()


def per_page(estimate: Tensor, pages: int) -> Tensor:
    """Estimates ``[B, Q, pages * units]`` -> ``[B, Q, pages, units]``."""
    return estimate.unflatten(-1, (pages, -1)) if pages else estimate.unsqueeze(-1)


def _view(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``stored.view(dtype)``, of a copy where a slice of a row is not aligned."""
    size = dtype.itemsize
    aligned = stored.storage_offset() % size == 0 and all(stride % size == 0 for stride in stored.stride()[:-1])
    if not aligned or stored.stride(-1) != 1:
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.view(dtype)
