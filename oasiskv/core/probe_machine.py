"""``--device here``: what this CPU reaches in the shapes of a decode step, measured in about two seconds.

Each rate is that of the fastest run, over data larger than the caches. Overhead is not measured: it is the preset's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import linear

from oasiskv.core.capacity import SummaryBytes
from oasiskv.core.container import usable_memory
from oasiskv.core.devices import PRESETS, Device
from oasiskv.core.page_scores import Candidates, page_scores
from oasiskv.core.scorers import Scorer
from oasiskv.core.settings import PART_TOKENS
from oasiskv.core.summary_store import SummaryStore

WIDTH, MATRICES = 1024, 64
"""Square bfloat16 matrices: 128 MiB."""
FEW_ROWS, MANY_ROWS = 4, 512
"""Rows of a decode step, where reading the weights takes the time, and of a prefill step, where arithmetic does."""
CONTEXT, LAYERS = 4096, 24
"""KV of one request with 2 KV heads: beyond the caches."""
PAGE_WORDS, PAGES = 1024, 8192
"""Pages of 8 KiB, copied in random order, as the host tier does."""

SECONDS_EACH = 0.35
"""Time for one rate."""
BUSY = 0.5
"""Load per thread from which on other work disturbs the measuring."""


def unmeasured() -> Device:
    """This machine with the preset's rates: enough to see what fits."""
    return replace(PRESETS["cpu"], name="this machine", memory_bytes=usable_memory())


def measure(scorer: Scorer, group: int) -> Device:
    """This machine with measured rates.

    Args:
        scorer: gives the head dimension too.
        group: query heads per KV head.
    """
    threads = torch.get_num_threads()
    with torch.inference_mode():
        return replace(
            unmeasured(),
            name=f"this machine, {threads} thread{'s' if threads > 1 else ''}",
            memory_bandwidth=weight_rate(),
            flops=matrix_rate(),
            kv_bandwidth=attention_rate(scorer.head_dim, group),
            summary_bandwidth=scoring_rate(scorer, group),
            link_bandwidth=copy_rate(),
            source=_circumstances(threads),
        )


def _circumstances(threads: int) -> str:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > BUSY * threads
    return "measured just now" + (f" beside other work, load {load:.1f}: rates are too low" if busy else "")


def weight_rate() -> float:
    """Bytes per second at which few rows are multiplied with many matrices, packed as vLLM's CPU backend packs them."""
    matrices = [_pack(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)) for _ in range(MATRICES)]
    rows = torch.ones(FEW_ROWS, WIDTH, dtype=torch.bfloat16)
    return MATRICES * WIDTH * WIDTH * 2 / _best(lambda: [multiply(rows) for multiply in matrices])


def matrix_rate() -> float:
    """FLOP per second of a bfloat16 product with many rows."""
    rows, matrix = (torch.ones(n, WIDTH, dtype=torch.bfloat16) for n in (MANY_ROWS, WIDTH))
    return 2 * MANY_ROWS * WIDTH * WIDTH / _best(lambda: linear(rows, matrix))


def attention_rate(head_dim: int, group: int) -> float:
    """KV bytes per second of attention of one row per query head, in bfloat16, as two products.

    (torch's fused attention is made for many rows: with one it takes two to three times as long as vLLM's kernel.)
    """
    keys = torch.randn(LAYERS, 2, CONTEXT, head_dim).bfloat16()
    values = torch.randn_like(keys)
    queries = torch.randn(2, group, head_dim).bfloat16()

    def attend() -> None:
        for k, v in zip(keys, values, strict=True):
            weights = torch.bmm(queries, k.transpose(1, 2)).float().softmax(-1)
            torch.bmm(weights.bfloat16(), v)

    return 2 * keys.nbytes / _best(attend)


def scoring_rate(scorer: Scorer, group: int) -> float:
    """Bytes of summaries per second that the scorer reads: all of every fourth page, where others are outlines."""
    heads, tokens = 2, 2 * PART_TOKENS
    pages, bytes_of = CONTEXT // tokens, SummaryBytes.of(scorer, tokens)
    store = SummaryStore.zeros(heads, pages, bytes_of.page, bytes_of.outline)
    store.put(torch.arange(pages), scorer.summarise(torch.randn(pages, tokens, heads, scorer.head_dim)))
    queries = torch.randn(1, heads * group, scorer.head_dim)
    candidates = Candidates(
        index=torch.arange(pages).view(1, -1),
        counts=torch.tensor([pages]),
        rows=torch.zeros(1, 2, dtype=torch.int64),
        row_counts=torch.tensor([[True, False]]),
    )
    refine, scale = pages // 4, scorer.head_dim**-0.5
    seconds = _best(lambda: page_scores(scorer, queries, store, candidates, scale, refine=refine))
    return heads * bytes_of.read(pages, refine) / seconds


def copy_rate() -> float:
    """Bytes per second of pages copied from random places to random places."""
    source = torch.ones(PAGES, PAGE_WORDS, dtype=torch.int64)
    target = torch.zeros_like(source)
    chosen = torch.randperm(PAGES)[: PAGES // 4]
    return len(chosen) * PAGE_WORDS * 8 / _best(lambda: target.index_copy_(0, chosen, source.index_select(0, chosen)))


def _pack(matrix: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A product with the matrix, reordered once for oneDNN where this build of torch and this CPU can."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return lambda rows: linear(rows, matrix)
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, FEW_ROWS)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest run, after one that does not count: other work on the machine can only slow a run."""
    work()
    fastest, end = float("inf"), time.perf_counter() + SECONDS_EACH
    while (began := time.perf_counter()) < end:
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
