"""The cases of ``oasiskv bench targets``: what is measured, and what is wanted of it.

The KV pool of a case is given in whole requests: so many of them stock vLLM can run at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oasiskv.bench.cells import Cell, Model, make_cell, pool_tokens
from oasiskv.bench.job import DENSE, LIMIT, OASIS
from oasiskv.bench.targets import Case, Contender, Target
from oasiskv.bench.workloads import WORKLOADS, Workload, repetitions

SMOLLM2, QWEN = "smollm2", "qwen2.5-coder-0.5b"
SHORT, LONG = "8,000", "128,000"
PLAIN, DRAFTS = "no drafts", "n-gram drafts"
DRAFTER = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}

Sized = Callable[[Model], Cell]


def _sized(
    workload: Workload,
    requests: int,
    budget: int,
    pool: int,
    options: tuple[str, ...] = (),
    stretch: bool = False,
    **settings: Any,
) -> Sized:
    """A cell with all its requests in flight, in a KV pool of so many tokens."""
    chosen = {"budget_tokens": budget, **settings}

    def cell(model: Model) -> Cell:
        size = pool * model.token_bytes
        return make_cell(model, workload, requests, requests, chosen, size, options=options, stretch=stretch)

    return cell


def _workload(name: str, prompt: int, output: int) -> Workload:
    return replace(WORKLOADS[name], prompt=prompt, output=output)


def _beside_dense(
    workload: Workload, requests: int, pool: int, budget: int = 2048, limit: bool = False
) -> dict[str, Contender]:
    """Dense vLLM and OasisKV, and the limit if it is wanted. ``pool``: whole requests."""
    cell = _sized(workload, requests, budget, pool_tokens(pool, workload))
    runs = {DENSE: Contender(cell, DENSE), OASIS: Contender(cell, OASIS)}
    return {**runs, LIMIT: Contender(cell, LIMIT, batch_of=OASIS)} if limit else runs


def _decoding(at_least: float) -> Target:
    return Target("tokens/s decoding, by dense", "decode_throughput", at_least=at_least)


def _whole_run(at_least: float) -> Target:
    return Target("tokens/s, by dense", "throughput", at_least=at_least)


def _efficiency(at_most: float) -> Target:
    return Target("step by the limit's", "beyond_ms", below=LIMIT, by="step_ms", at_most=at_most)


def _more_requests(name: str, prompt: int, decoding: float) -> Case:
    return Case(
        name,
        f"32 requests of {prompt:,} tokens, filled, in a pool of four",
        QWEN,
        _beside_dense(_workload("decode", prompt, 64), requests=32, pool=4, limit=True),
        (_decoding(decoding), _efficiency(1.15)),
    )


def _same_batch(name: str, prompt: int, decoding: float) -> Case:
    return Case(
        name,
        f"8 requests of {prompt:,} tokens, filled, in a pool that is large enough for all",
        QWEN,
        _beside_dense(_workload("decode", prompt, 64), requests=8, pool=10, limit=True),
        (_decoding(decoding), _efficiency(1.15)),
    )


def _step_with_context() -> Case:
    """The same pool in bytes for both contexts: two of the longer ones."""
    workloads = {SHORT: _workload("decode", 8_000, 32), LONG: _workload("decode", 128_000, 32)}
    pool = pool_tokens(2, workloads[LONG])

    def run(workload: Workload) -> Contender:
        return Contender(_sized(workload, 8, 2048, pool, stretch=True, residency="bounded"), OASIS)

    return Case(
        "step-128k",
        "8 bounded requests: a step at 128,000 tokens by one at 8,000",
        QWEN,
        {label: run(workload) for label, workload in workloads.items()},
        (Target("step, by that at 8,000", "step_ms", LONG, SHORT, at_most=1.25),),
    )


def _drafts() -> Case:
    workload = _workload("long-context", 5_000, 256)

    def run(*options: str) -> Contender:
        return Contender(_sized(workload, 4, 1024, pool_tokens(2, workload), options, residency="bounded"), OASIS)

    return Case(
        "ngram",
        "4 bounded requests on repetitive text: n-gram drafts beside none",
        SMOLLM2,
        {PLAIN: run(), DRAFTS: run("--speculative-config", json.dumps(DRAFTER))},
        (Target("tokens/s decoding, by no drafts", "decode_throughput", DRAFTS, PLAIN, at_least=1.3),),
        repetitions,
    )


CASES = {
    case.name: case
    for case in (
        Case(
            "long-context",
            "24 prompts of 7,000 tokens, answers of 512, in a pool of four",
            SMOLLM2,
            _beside_dense(_workload("long-context", 7_000, 512), requests=24, pool=4),
            (_decoding(2.1), _whole_run(1.5)),
        ),
        _more_requests("decode-16k", 16_000, 4.0),
        _more_requests("decode-30k", 30_000, 5.5),
        Case(
            "reasoning",
            "12 prompts of 200 tokens, answers of 3,000 (a round with 6,000 takes over 15 minutes), in a pool of two",
            SMOLLM2,
            _beside_dense(_workload("reasoning", 200, 3_000), requests=12, pool=2, budget=1024),
            (_whole_run(1.69),),
        ),
        _same_batch("batch-16k", 16_000, 1.6),
        _same_batch("batch-30k", 30_000, 2.8),
        _step_with_context(),
        Case(
            "within-budget",
            "1 request of 1,000 tokens, answer of 512: never beyond the budget",
            SMOLLM2,
            _beside_dense(_workload("long-context", 1_000, 512), requests=1, pool=4),
            (_decoding(0.98),),
        ),
        Case(
            "one-7k",
            "1 request of 7,000 tokens, filled",
            SMOLLM2,
            _beside_dense(_workload("decode", 7_000, 256), requests=1, pool=2),
            (_decoding(1.0),),
        ),
        Case(
            "one-30k",
            "1 request of 30,000 tokens, filled",
            QWEN,
            _beside_dense(_workload("decode", 30_000, 128), requests=1, pool=2),
            (_decoding(1.2),),
        ),
        Case(
            "scheduler",
            "64 requests of 2,500 tokens, filled, in a pool that is large enough for all",
            SMOLLM2,
            _beside_dense(_workload("decode", 2_500, 64), requests=64, pool=70, budget=1024),
            (Target("scheduler's time, by dense", "scheduler_ms", at_most=1.15),),
        ),
        _drafts(),
    )
}
"""By name, in the order in which they run."""
