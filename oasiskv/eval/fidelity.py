"""``oasiskv eval fidelity``: along a real text that is forced on it, how far is a sparse engine from a dense one?

In the engine itself, without drafts, so that the current row alone chooses. Every context is computed once; dense and
all budgets then follow the same tokens, and are compared token by token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from oasiskv.eval.engine import Ask, EvalEngine
from oasiskv.eval.options import add_budgets, bar, whole_numbers
from oasiskv.eval.statistics import Interval, paired, token_blocks
from oasiskv.models.data import essays
from oasiskv.report.output import Report
from oasiskv.report.page import Section
from oasiskv.report.table import Table
from oasiskv.vllm_plugin.trace import Trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NOTES = (
    "Teacher-forced decoding in the engine, no drafts; the first token of each text (still dense) is left out. "
    "Δ perplexity by the exponent of the mean difference in nats; KL to dense in nats per token; same token: how often "
    "the most likely one is dense's. 95 % intervals, resampling stretches of 32 tokens."
)


QUICK = {"contexts": [3000, 4000, 5000], "forced": 96}
"""Sizes for minutes on two cores."""


@dataclass(frozen=True)
class Arm:
    """What one budget was along all texts: arrays ``[texts, steps]`` of nats, nats and booleans."""

    budget: int
    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray


@dataclass(frozen=True)
class Fidelity:
    """``dense`` ``[texts, steps]``: its nats. ``contexts``: tokens before each text's continuation."""

    contexts: tuple[int, ...]
    dense: np.ndarray
    arms: tuple[Arm, ...]


def follow(
    engine: EvalEngine, texts: Sequence[Sequence[int]], steps: int, budgets: Sequence[int], done: Any
) -> Fidelity:
    """Force the last ``steps`` tokens of each text on dense attention and on every budget."""
    prompts, tails = [t[:-steps] for t in texts], [t[-steps:] for t in texts]
    engine.read(prompts, done)
    dense = [Trace(tail, keeps=True) for tail in tails]
    engine.answer([Ask(p, 1, None, trace) for p, trace in zip(prompts, dense, strict=True)], done)
    arms = []
    for budget in budgets:
        traces = [Trace(tail, beside=d.logprobs) for tail, d in zip(tails, dense, strict=True)]
        engine.answer([Ask(p, 1, budget, trace) for p, trace in zip(prompts, traces, strict=True)], done)
        arms.append(
            Arm(
                budget,
                np.array([trace.nll[1:] for trace in traces]),
                np.array([trace.kl[1:] for trace in traces]),
                np.array([trace.same_top[1:] for trace in traces]),
            )
        )
    return Fidelity(tuple(map(len, prompts)), np.array([d.nll[1:] for d in dense]), tuple(arms))


def interval(values: np.ndarray) -> Interval:
    """Mean of ``[texts, steps]`` with its interval."""
    texts, steps = values.shape
    return paired(values.ravel(), token_blocks([steps] * texts))


def table(found: Fidelity, title: str) -> Table:
    """One line for each budget."""
    base = math.exp(found.dense.mean())
    rows = [("dense", f"{base:.2f}", "-", "-", "-", "-")]
    for arm in found.arms:
        more = interval(arm.nll - found.dense)
        change = Interval(*(100 * math.expm1(value) for value in (more.mean, more.low, more.high)))
        same = interval(arm.same.astype(float))
        rows.append(
            (
                f"budget {arm.budget:,}",
                f"{math.exp(arm.nll.mean()):.2f}",
                change.text(1),
                interval(arm.kl).text(4),
                f"{100 * same.mean:.1f} ({100 * same.low:.1f} to {100 * same.high:.1f})",
                f"{100 * np.mean(arm.kl > 0.1):.1f}",
            )
        )
    columns = ("", "perplexity", "change %", "KL to dense", "same token %", "KL > 0.1, % of tokens")
    return Table(title, columns, tuple(rows), NOTES)


def by_context(found: Fidelity) -> Table:
    """KL to dense by how much stands before."""
    rows = [
        (f"{context:,}", *(interval(arm.kl[i : i + 1]).text(4) for arm in found.arms))
        for i, context in sorted(enumerate(found.contexts), key=lambda pair: pair[1])
    ]
    columns = ("tokens before", *(f"budget {arm.budget:,}" for arm in found.arms))
    return Table("KL to dense by position", columns, tuple(rows))


def findings(found: Fidelity) -> list[str]:
    """Sentences."""
    sentences = []
    for arm in found.arms:
        more, same = interval(arm.nll - found.dense), arm.same.mean()
        sentences.append(
            f"Budget {arm.budget:,}: perplexity changes by {100 * math.expm1(more.mean):+.2f} % "
            f"({100 * math.expm1(more.low):+.2f} to {100 * math.expm1(more.high):+.2f}), the most likely token is "
            f"dense's at {same:.1%} of the places."
        )
    return sentences


def plot(found: Fidelity) -> Figure:
    """KL along the texts."""
    from plotly import graph_objects as go

    figure = go.Figure(
        layout={
            "title": "KL to dense along the text, mean of texts and of 8 tokens",
            "xaxis": {"title": "tokens decoded"},
            "yaxis": {"title": "nats", "rangemode": "tozero"},
        }
    )
    for arm in found.arms:
        mean = arm.kl.mean(0)
        whole = len(mean) // 8 * 8
        figure.add_scatter(
            x=list(range(4, whole, 8)), y=mean[:whole].reshape(-1, 8).mean(1).tolist(), name=f"budget {arm.budget:,}"
        )
    return figure


def sections(found: Fidelity, tables: Sequence[Table]) -> list[Section]:
    """For the page."""
    return [Section("Fidelity along real text", findings(found), tables, [plot(found)])]


def as_dict(found: Fidelity) -> dict[str, Any]:
    """For JSON."""
    return {
        "kind": "fidelity",
        "contexts": list(found.contexts),
        "dense_nll": float(found.dense.mean()),
        "arms": [
            {
                "budget_tokens": arm.budget,
                "nll_more": interval(arm.nll - found.dense).as_dict(),
                "kl": interval(arm.kl).as_dict(),
                "same_token": interval(arm.same.astype(float)).as_dict(),
            }
            for arm in found.arms
        ],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line of this measurement, besides model and output."""
    add_budgets(parser)
    parser.add_argument(
        "--contexts", type=whole_numbers, default=[3000, 4000, 5000, 6000],
        help="tokens before the forced part, one text for each (3000,4000,5000,6000)",
    )  # fmt: skip
    parser.add_argument("--forced", type=int, default=160, help="tokens forced in each (160)")


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest request."""
    return max(args.contexts) + args.forced + 1


def texts_of(encode: Any, contexts: Sequence[int], forced: int) -> list[list[int]]:
    """Pieces of the essays of the wanted lengths, from different places."""
    source = list(encode(essays()))
    stride = len(source) // len(contexts)
    return [(source[i * stride :] + source)[: n + forced] for i, n in enumerate(contexts)]


def measure(args: argparse.Namespace, engine: EvalEngine, console: Console) -> Report:
    """Run it."""
    tokenizer = engine.tokenizer
    tokenizer.model_max_length = 1 << 30  # the essays are longer than any context; only pieces of them are used
    texts = texts_of(lambda text: tokenizer.encode(text, add_special_tokens=False), args.contexts, args.forced)
    with bar("fidelity", len(texts) * (2 + len(args.budgets)), console) as done:
        found = follow(engine, texts, args.forced, args.budgets, done)
    title = f"Fidelity: {args.model}, {len(texts)} essays, {found.dense.size} tokens forced"
    tables = [table(found, title), by_context(found)]
    return Report(f"Fidelity: {args.model}", tables, findings(found), lambda: sections(found, tables), as_dict(found))
