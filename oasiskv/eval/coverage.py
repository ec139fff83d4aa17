"""``oasiskv eval coverage``: how much of what attention looks at does each policy hold, layer by layer?

The study runs in transformers with real weights and the engine's own classes for choosing, so that policies can be
compared that no engine has: an oracle, a blind choice.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from oasiskv.core.settings import Settings
from oasiskv.eval.options import add_budgets, bar, names
from oasiskv.eval.policies import DTYPES, Policy, label, parse_scorer, policies
from oasiskv.eval.statistics import paired, token_blocks
from oasiskv.eval.study import CoverageStudy, Measures, prefill, run
from oasiskv.eval.texts import RetrievalText, essay_text, key_value_text
from oasiskv.models import load_tokenizer, resolve_model
from oasiskv.report.output import Report
from oasiskv.report.page import Section
from oasiskv.report.table import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DEFAULT_SCORERS = "random,minmax,mean,box,q2,oracle"
COVERAGE_NOTES = (
    "Open loop: dense's queries choose, and dense's softmax mass on the choice is measured, in every layer and query "
    "head at every step. p1: first percentile; of the middle: the part held of the mass between sinks and window. "
    "Overlap: of the blocks with most mass, as many as there are hot slots, the share that was resident."
)
LIKELIHOOD_NOTES = (
    "Closed loop: the policy lives with its own choice. ΔNLL: nats per token more than dense, on answers (which can be "
    "looked up in the prompt) and on all tokens; KL: nats from dense's next-token distribution; with 95 % intervals, "
    "resampling stretches of 32 tokens. Pages in: per layer, KV head and step."
)
WORST_LAYERS = 3
QUICK = {"tokens": 4000, "steps": 60, "texts": 1, "scorers": "random,box,q2,oracle"}
"""Sizes for minutes on two cores."""


@dataclass(frozen=True)
class Outcome:
    """The measures of all texts, one after the other; column 0 of each is dense."""

    policies: Sequence[Policy]
    measures: Measures
    is_value: torch.Tensor
    """bool ``[steps]``: the token that the step predicts belongs to an answer."""
    steps: tuple[int, ...]
    """Of each text."""

    @property
    def labels(self) -> list[str]:
        """Of the policies."""
        return [label(policy, self.policies) for policy in self.policies]


def study_texts(
    model: Any, texts: Sequence[RetrievalText], chosen: Sequence[Policy], block_size: int, on_step: Callable[[], None]
) -> Outcome:
    """Run every text through all policies."""
    found: list[Measures] = []
    is_value: list[bool] = []
    counts: list[int] = []
    for text in texts:
        steps = len(text.continuation) - 1
        study = CoverageStudy(prefill(model, text.prompt), chosen, block_size, steps)
        found.append(run(model, study, text.continuation, on_step=on_step))
        is_value += text.is_value[1:]
        counts.append(steps)
    joined = Measures(**{f.name: torch.cat([getattr(m, f.name) for m in found]) for f in fields(Measures)})
    return Outcome(chosen, joined, torch.tensor(is_value), tuple(counts))


def coverage_table(outcome: Outcome, title: str) -> Table:
    """Mass and overlap."""
    rows = []
    for i, name in enumerate(outcome.labels, 1):
        mass, overlap = outcome.measures.mass[:, i], outcome.measures.overlap[:, i]
        missing = float((1 - mass.mean()) / outcome.measures.middle.mean())
        by_layer = mass.mean((0, 2))
        worst = by_layer.argsort()[:WORST_LAYERS].tolist()
        rows.append(
            (
                name,
                f"{100 * mass.mean():.1f}",
                f"{100 * mass.flatten().kthvalue(max(1, math.ceil(0.01 * mass.numel()))).values:.1f}",
                f"{100 * mass.min():.1f}",
                f"{100 * (1 - missing):.1f}",
                f"{100 * overlap.mean():.0f}",
                ", ".join(f"{layer}: {100 * by_layer[layer]:.0f}" for layer in worst),
            )
        )
    columns = ("policy", "mass %", "p1", "worst", "of the middle %", "overlap %", "worst layers, mass %")
    return Table(title, columns, tuple(rows), COVERAGE_NOTES)


def likelihood_table(outcome: Outcome, title: str) -> Table:
    """What living with the choice costs."""
    m, value = outcome.measures, outcome.is_value
    groups = torch.from_numpy(token_blocks(outcome.steps))
    rows = [("dense", _mean(m.nll[value, 0]) + " (NLL)", _mean(m.nll[:, 0]) + " (NLL)", "0", "100", "0.0")]
    for i, name in enumerate(outcome.labels, 1):
        more = m.nll[:, i] - m.nll[:, 0]
        rows.append(
            (
                name,
                interval(more[value], groups[value]),
                interval(more, groups),
                interval(m.kl[:, i], groups),
                f"{100 * m.same_top[:, i].float().mean():.0f}",
                f"{m.pages_in[:, i].mean():.1f}",
            )
        )
    columns = ("policy", "ΔNLL answers", "ΔNLL all", "KL to dense", "same token %", "pages in")
    return Table(title, columns, tuple(rows), LIKELIHOOD_NOTES)


def interval(values: torch.Tensor, groups: torch.Tensor) -> str:
    """``+0.12 (+0.08 to +0.16)``: mean with its 95 % interval."""
    if len(values) < 2:
        return "n/a"
    return paired(values.numpy(), groups.numpy()).text(3)


def _mean(values: torch.Tensor) -> str:
    return f"{values.mean():.3f}" if len(values) else "n/a"


def findings(outcome: Outcome) -> list[str]:
    """Sentences: for each budget, what the engine's scorer holds (the first, if it is not there) beside the others."""
    found = []
    mass = dict(zip(outcome.policies, outcome.measures.mass.mean((0, 2, 3))[1:].tolist(), strict=True))
    for budget in dict.fromkeys(policy.settings.budget_tokens for policy in outcome.policies):
        own = {p: m for p, m in mass.items() if p.settings.budget_tokens == budget}
        first = next((p for p in own if p.scorer == Settings().scorer), next(iter(own)))
        others = [f"{label(p, list(own))} {m:.1%}" for p, m in own.items() if p is not first]
        beside = f" ({', '.join(others)})" if others else ""
        found.append(
            f"Budget {budget:,}: {label(first, list(own))} holds {own[first]:.1%} of the softmax mass{beside}."
        )
    return found


def sections(outcome: Outcome, tables: Sequence[Table]) -> list[Section]:
    """Tables and plots."""
    return [
        Section("Softmax mass held", tables=tables[:1], plots=[_by_budget(outcome), _by_layer(outcome)]),
        Section("What living with the choice costs", tables=tables[1:]),
    ]


def _by_budget(outcome: Outcome) -> Figure:
    from plotly import graph_objects as go

    plot = go.Figure(
        layout={"title": "Mean softmax mass held", "xaxis": {"title": "budget, tokens"}, "yaxis": {"title": "%"}}
    )
    mass = (100 * outcome.measures.mass.mean((0, 2, 3))[1:]).tolist()
    lines: dict[str, list[tuple[int, float]]] = {}
    for policy, held in zip(outcome.policies, mass, strict=True):
        name = label(policy, [p for p in outcome.policies if p.settings.budget_tokens == policy.settings.budget_tokens])
        lines.setdefault(name, []).append((policy.settings.budget_tokens, held))
    for name, points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        plot.add_scatter(x=x, y=y, mode="lines+markers", name=name)
    return plot


def _by_layer(outcome: Outcome) -> Figure:
    from plotly import graph_objects as go

    held = 100 * outcome.measures.mass.mean((0, 3))[1:]
    plot = go.Figure(
        go.Heatmap(z=held.tolist(), y=outcome.labels, colorscale="Viridis", colorbar={"title": "%"}),
        layout={"title": "Mass held by layer", "xaxis": {"title": "layer"}},
    )
    plot.update_yaxes(autorange="reversed")
    return plot


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """All that the tables say, unrounded, for JSON."""
    m = outcome.measures
    return {
        "kind": "coverage",
        "steps": len(outcome.is_value),
        "answer_tokens": int(outcome.is_value.sum()),
        "policies": [
            {
                "label": name,
                "scorer": policy.scorer,
                "settings": policy.settings.model_dump(),
                "mass": float(m.mass[:, i].mean()),
                "mass_by_layer": m.mass[:, i].mean((0, 2)).tolist(),
                "overlap": float(m.overlap[:, i].mean()),
                "nll_more": float((m.nll[:, i] - m.nll[:, 0]).mean()),
                "kl": float(m.kl[:, i].mean()),
                "same_token": float(m.same_top[:, i].float().mean()),
            }
            for i, (policy, name) in enumerate(zip(outcome.policies, outcome.labels, strict=True), 1)
        ],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line of this measurement, besides model and output."""
    own = Settings()
    add_budgets(parser)
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of each prompt (6000)")
    parser.add_argument("--steps", type=int, default=120, help="tokens that follow it (120)")
    parser.add_argument("--texts", type=int, default=2, help="texts (2)")
    parser.add_argument("--text", choices=("key-value", "essays"), default="key-value", help="kind of text (key-value)")
    parser.add_argument(
        "--scorers", type=names, default=DEFAULT_SCORERS, help=f"with commas ({DEFAULT_SCORERS}); box:int8"
    )
    parser.add_argument("--caps", type=names, default=str(own.fetch_cap), help="values of fetch_cap")
    parser.add_argument("--predictors", type=names, default=own.predictor, help="values of predictor")
    parser.add_argument("--granularities", type=names, default=own.granularity, help="values of granularity")
    parser.add_argument("--merges", type=names, default=own.group_merge, help="values of group_merge")
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a block (32)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (float32)")
    parser.add_argument("--seed", type=int, default=0, help="of the first text (0)")


def chosen_policies(args: argparse.Namespace, settings: Mapping[str, Any]) -> list[Policy]:
    """All that the command line names, with the other ``settings`` that were given.

    Raises:
        SettingsError, ValueError: one of them is not allowed.
    """
    found = policies(
        [parse_scorer(name) for name in names(args.scorers)],
        settings,
        budget_tokens=args.budgets,
        fetch_cap=names(args.caps),
        predictor=names(args.predictors),
        granularity=names(args.granularities),
        group_merge=names(args.merges),
    )
    for policy in found:
        policy.geometry(args.block_size)
        policy.cap(args.block_size)
    return found


def measure(args: argparse.Namespace, settings: Mapping[str, Any], console: Console) -> Report:
    """Run it."""
    chosen = chosen_policies(args, settings)
    folder = resolve_model(args.model)
    tokenizer = load_tokenizer(folder)
    make = key_value_text if args.text == "key-value" else essay_text
    texts = [make(tokenizer, args.tokens, args.steps + 1, args.seed + i) for i in range(args.texts)]
    model = _load(folder, DTYPES[args.dtype])
    with bar("coverage", args.texts * args.steps, console) as advance:
        outcome = study_texts(model, texts, chosen, args.block_size, advance)
    what = f"{args.texts} x {len(texts[0].prompt):,} tokens of {args.text} text, {len(outcome.is_value)} steps"
    tables = [
        coverage_table(outcome, f"Coverage: {args.model}, {what}"),
        likelihood_table(outcome, f"Likelihood: {int(outcome.is_value.sum())} of the tokens in answers"),
    ]
    return Report(
        f"Coverage: {args.model}", tables, findings(outcome), lambda: sections(outcome, tables), as_dict(outcome)
    )


def _load(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
