"""What a load of equal requests holds, and how many of them fit: stock vLLM's memory, and OasisKV's.

pool      | empty block | blocks that are handed out: P                     | summaries (OasisKV on an accelerator) |
dense     full full full                      floor(P / F)                  F: blocks of prompt and output
bounded   prompt B B B B B                    floor((P - F) / B) + 1        F: prompt, B: bounded footprint
          B B B B B B B                       floor(P / B)                  where prompts arrive prefilled
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from oasiskv.core.devices import GIB
from oasiskv.core.geometry import Geometry, blocks_for, running_at_once
from oasiskv.core.model_shape import ModelShape
from oasiskv.core.settings import PART_TOKENS, Settings, SettingsError

if TYPE_CHECKING:
    from oasiskv.core.scorers import Scorer

State = Literal["dense", "in_place", "bounded"]
NULL_BLOCKS = 1
"""vLLM keeps one block of the pool as the empty one."""
IN_PLACE_PAYS = 2
"""While memory suffices, `auto` leaves requests dense below this multiple of the budget."""


@dataclass(frozen=True)
class SummaryBytes:
    """Bytes of one page's summary for one KV head, and of the outline that it begins with (0: there is none)."""

    page: int
    outline: int = 0

    @classmethod
    def of(cls, scorer: Scorer, block_size: int) -> SummaryBytes:
        """What ``scorer`` keeps."""
        return cls(scorer.page_bytes(block_size // PART_TOKENS), scorer.outline_bytes)

    def read(self, pages: float, refine: int | None) -> float:
        """Bytes that one KV head's scores of ``pages`` pages are made from; ``refine`` as for
        :func:`oasiskv.core.page_scores.page_scores`."""
        refined = pages if not self.outline or refine is None else min(refine, pages)
        return pages * self.outline + refined * (self.page - self.outline)


@dataclass(frozen=True)
class Workload:
    """The load: every request alike.

    ``concurrency`` None: as many as fit. ``draft_tokens`` are verified in each step; each is accepted with probability
    ``acceptance`` if those before it were. ``mfu``: share of the device's FLOP/s that prefill reaches.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    draft_tokens: int = 0
    acceptance: float = 0.7
    prefill_here: bool = True
    mfu: float = 0.5

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SettingsError: one of them is not allowed.
        """
        least = {"prompt_tokens": 1, "output_tokens": 1, "concurrency": 1, "draft_tokens": 0}
        for name, allowed in least.items():
            value = getattr(self, name)
            if value is not None and value < allowed:
                raise SettingsError(f"{name}={value} is not allowed: it must be {allowed} or more")
        if not 0 <= self.acceptance <= 1:
            raise SettingsError(f"acceptance={self.acceptance:g} is not allowed: it is a probability, 0 to 1")
        if not 0 < self.mfu <= 1:
            raise SettingsError(f"mfu={self.mfu:g} is not allowed: it is a share, above 0 and at most 1")

    @property
    def end(self) -> int:
        """Context when a request ends, in tokens: what must fit."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean(self) -> float:
        """Mean context while a request decodes: what is read."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def rows(self) -> int:
        """Rows of one request in a step."""
        return 1 + self.draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of one request and step: ``1 + a + ... + a^k`` (Leviathan et al., 2023, equation 1)."""
        return float(sum(self.acceptance**i for i in range(self.rows)))


@dataclass(frozen=True)
class Holding:
    """Memory of one way to serve the load. Blocks are of ``block_size`` tokens.

    Args:
        pool_blocks: blocks that requests can get.
        summary_blocks: blocks whose memory holds summaries.
        full_blocks: a request's whole context at its end.
        held_blocks: most that a decoding request holds; with the sliding-window layers ``held_bytes``.
        fits: requests at once on the device, every prompt prefilled here.
        fits_elsewhere: the same, prompts arriving prefilled.
        host_bytes_each: host memory of one request, summaries included (0: it needs none).
        fits_host: requests that the host pool holds (None: they need none).
    """

    state: State
    block_size: int
    pool_blocks: int
    summary_blocks: int
    full_blocks: int
    held_blocks: int
    held_bytes: int
    fits: int
    fits_elsewhere: int
    host_bytes_each: int = 0
    fits_host: int | None = None

    def running(self, load: Workload) -> int:
        """Requests that run at once under ``load``."""
        most = [self.fits if load.prefill_here else self.fits_elsewhere]
        return min(most + [limit for limit in (self.fits_host, load.concurrency) if limit is not None])


def hold_dense(shape: ModelShape, load: Workload, pool_bytes: int, block_size: int) -> Holding:
    """Stock vLLM: every request holds its whole context.

    Raises:
        SettingsError: the model's context is shorter than the load's, or the pool holds less than one request.
    """
    _check(shape, load, pool_bytes, block_size)
    block_bytes = block_size * shape.kv_bytes_per_token
    blocks = pool_bytes // block_bytes - NULL_BLOCKS
    full = blocks_for(load.end, block_size)
    each = full * block_bytes + shape.sliding_bytes(load.end)
    fits = blocks * block_bytes // each
    return Holding("dense", block_size, blocks, 0, full, full, each, fits, fits)


def hold_oasis(
    shape: ModelShape,
    load: Workload,
    settings: Settings,
    summary: SummaryBytes,
    pool_bytes: int,
    block_size: int,
    host_bytes: int,
    shared_memory: bool = False,
) -> Holding:
    """OasisKV, in the state that ``settings.residency`` leads to.

    Args:
        summary: what the scorer keeps.
        host_bytes: host pool, which limits what runs at once too.
        shared_memory: host and device memory are the same: the host pool holds the summaries of the device's blocks.

    Raises:
        SettingsError: as for :func:`hold_dense`; the budget leaves no hot slot; the host pool holds no request.
    """
    geometry = Geometry.of(settings, block_size)
    _check(shape, load, pool_bytes, block_size)
    block_bytes = block_size * shape.kv_bytes_per_token
    block_summaries = summary.page * shape.layers * shape.kv_heads
    all_blocks = pool_bytes // block_bytes
    of_pool = all_blocks * block_summaries
    beside = of_pool if shared_memory and host_bytes and settings.residency in ("auto", "bounded") else 0
    summary_blocks = 0 if beside else -(-of_pool // block_bytes)
    given, host_bytes = host_bytes, max(0, host_bytes - beside)
    blocks = all_blocks - summary_blocks - NULL_BLOCKS
    full, sliding = blocks_for(load.end, block_size), shape.sliding_bytes(load.end)
    pool, full_bytes = blocks * block_bytes, full * block_bytes + sliding
    if pool < full_bytes:
        raise SettingsError(
            f"the KV pool of {all_blocks} blocks keeps {blocks} beside {summary_blocks} for summaries; one request of "
            f"{load.end} tokens needs {full}; give more with --pool-gib, or use --scorer box"
        )
    host_each = full * (block_bytes + block_summaries)
    whole_fit = pool // full_bytes
    state = _state(settings, geometry, load, whole_fit, host_bytes // host_each)
    if state != "bounded":
        return Holding(state, block_size, blocks, summary_blocks, full, full, full_bytes, whole_fit, whole_fit)
    held = min(full, geometry.footprint(load.draft_tokens))
    each = held * block_bytes + sliding
    prompt = blocks_for(load.prompt_tokens, block_size) * block_bytes + sliding
    fits, elsewhere = running_at_once(pool, max(prompt, each), each), pool // each
    if host_bytes < host_each:
        summaries = " beside the KV pool's summaries" if beside else ""
        raise SettingsError(
            f"a host pool of {given / GIB:.3f} GiB holds no request of {load.end} tokens{summaries}; allowed is "
            f"--host-gib {(host_each + beside) / GIB:.3f} or more"
        )
    counts = (block_size, blocks, summary_blocks, full, held, each, fits, elsewhere, host_each)
    return Holding(state, *counts, fits_host=host_bytes // host_each)


def check_context(shape: ModelShape, load: Workload) -> None:
    """Refuse a load that is longer than the model's context.

    Raises:
        SettingsError: it is.
    """
    if load.end > shape.max_context:
        raise SettingsError(
            f"a context of {load.end} tokens (prompt {load.prompt_tokens}, output {load.output_tokens}) is longer than "
            f"the {shape.max_context} of {shape.name}; lower --prompt or --output, or plan a model with a longer one"
        )


def _check(shape: ModelShape, load: Workload, pool_bytes: int, block_size: int) -> None:
    check_context(shape, load)
    block_bytes = block_size * shape.kv_bytes_per_token
    need = (blocks_for(load.end, block_size) + NULL_BLOCKS) * block_bytes + shape.sliding_bytes(load.end)
    if pool_bytes < need:
        raise SettingsError(
            f"a KV pool of {max(pool_bytes, 0) / GIB:.3f} GiB does not hold one request of {load.end} tokens; allowed "
            f"is {need / GIB:.3f} or more; give more with --pool-gib or --devices, or lower --prompt"
        )


def _state(settings: Settings, geometry: Geometry, load: Workload, whole_fit: int, host_fits: int) -> State:
    """The state in which the requests decode, all alike: under `auto` in truth some may be bounded and others not.

    Args:
        whole_fit: requests that fit in full.
        host_fits: requests that the host pool holds; `auto` leaves the others on the device.
    """
    longest_dense = geometry.bound * geometry.block_size
    if settings.min_context_tokens != "auto":
        longest_dense = max(longest_dense, settings.min_context_tokens)
    if settings.residency == "dense" or load.end <= longest_dense:
        return "dense"
    if settings.residency != "auto":
        return settings.residency
    if (load.concurrency is None or load.concurrency > whole_fit) and host_fits > whole_fit:
        return "bounded"
    return "in_place" if load.mean >= IN_PLACE_PAYS * settings.budget_tokens else "dense"
