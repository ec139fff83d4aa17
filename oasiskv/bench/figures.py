"""From the steps and answers of a run to its figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oasiskv.bench.job import Run, Sample

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Figures:
    """One run's figures.

    ``seconds`` cover everything from the first request to the last answer, prompts included, loading not.
    ``throughput``: output tokens by them; ``decode_throughput``: in the steps that compute no prompt. ``batch``: the
    requests of the steps in which most of those were made; ``step_ms``: the median step with that batch.
    ``scheduler_ms``: the scheduler's part of it (``schedule`` and ``update_from_output``), its own median.
    ``beyond_batch``, ``beyond_ms``: batch and step of the steps in which every context is longer than the budget.
    ``ttft`` (time to first token) and ``tpot`` (time per output token after it): seconds at the 50th, 95th and 99th
    percentile of requests. ``fetched_per_step``: bytes from the host pool by steps in which some request decodes.
    ``pipeline_share``: time of scoring and planning, in whichever thread, by the time of those steps. ``blocks_mean``,
    ``blocks_most``: device blocks over all decoding requests and steps.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    throughput: float
    decode_throughput: float
    step_ms: float
    batch: int
    scheduler_ms: float
    beyond_ms: float
    beyond_batch: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    running: int
    decoding: int
    preemptions: int
    fetched_per_step: float
    pipeline_share: float
    blocks_mean: float
    blocks_most: int
    load_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures(run: Run, budget: int = 0) -> Figures:
    """Put a run together. ``budget`` in tokens."""
    samples = run.samples
    held = [blocks for sample in samples for blocks in sample.blocks]
    decoding = [sample for sample in samples if sample.only_decodes]
    with_decodes = [sample for sample in samples if sample.blocks]
    seconds = sum(s.seconds for s in samples)
    decode_seconds = sum(s.seconds for s in decoding)
    batch, step_ms = usual_step(samples)
    beyond_batch, beyond_ms = usual_step([s for s in samples if s.shortest > budget])
    later = [(a.last - a.first) / (a.tokens - 1) for a in run.answers if a.tokens > 1]
    return Figures(
        seconds=seconds,
        prompt_tokens=sum(a.prompt_tokens for a in run.answers),
        output_tokens=sum(s.new_tokens for s in samples),
        throughput=sum(s.new_tokens for s in samples) / seconds if seconds else 0.0,
        decode_throughput=sum(s.new_tokens for s in decoding) / decode_seconds if decode_seconds else 0.0,
        step_ms=step_ms,
        batch=batch,
        scheduler_ms=1e3 * _median([s.scheduler for s in _usual(samples)]),
        beyond_ms=beyond_ms,
        beyond_batch=beyond_batch,
        ttft=_percentiles([a.first - a.arrived for a in run.answers]),
        tpot=_percentiles(later),
        running=max((s.running for s in samples), default=0),
        decoding=max((len(s.blocks) for s in samples), default=0),
        preemptions=run.preemptions,
        fetched_per_step=sum(s.fetched for s in samples) / max(1, len(with_decodes)),
        pipeline_share=sum(s.pipeline for s in samples) / max(1e-9, sum(s.seconds for s in with_decodes)),
        blocks_mean=sum(held) / max(1, len(held)),
        blocks_most=max(held, default=0),
        load_seconds=run.load_seconds,
    )


def usual_step(samples: Sequence[Sample]) -> tuple[int, float]:
    """The batch in which most tokens were made, of the steps that only decode, and their median in milliseconds."""
    usual = _usual(samples)
    return (usual[0].answering if usual else 0), 1e3 * _median([s.seconds for s in usual])


def _usual(samples: Sequence[Sample]) -> list[Sample]:
    """The steps that only decode, with the batch in which most tokens were made."""
    decoding = [s for s in samples if s.only_decodes]
    made: Counter[int] = Counter()
    for sample in decoding:
        made[sample.answering] += sample.new_tokens
    batch = max(made, key=lambda size: (made[size], size), default=0)
    return [s for s in decoding if s.answering == batch]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return (0.0,) * len(PERCENTILES)
    return tuple(float(v) for v in np.percentile(values, PERCENTILES))
