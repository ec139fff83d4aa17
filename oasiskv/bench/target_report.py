"""The table of targets, what it says in sentences, its page and its JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oasiskv.bench.cells import TITLES
from oasiskv.bench.targets import FALLS_SHORT, NOT_RUN, PASS, CaseResult, Verdict
from oasiskv.report.output import Report
from oasiskv.report.page import Section
from oasiskv.report.statistics import spread
from oasiskv.report.table import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = ("case", "ratio", "target", "median", "least to most", "rounds", "result")
DIGITS = 3
KIND = "targets"
"""Of the JSON."""
NOTES = "Ratios are taken within a round; a target is met if their median keeps its bound."
FIGURES = {
    "throughput": ("tokens/s, whole run", 1),
    "decode_throughput": ("tokens/s, decoding", 1),
    "step_ms": ("step, ms", 1),
    "batch": ("its batch", 0),
    "scheduler_ms": ("its scheduler, ms", 2),
    "beyond_ms": ("step beyond the budget, ms", 1),
    "running": ("running at once", 0),
    "preemptions": ("preemptions", 0),
}
"""Shown of every run: name for people, digits."""


def title(label: str) -> str:
    """Of a run, for people: the row's where the label is a row's name."""
    return TITLES.get(label, label)


def table(results: Sequence[CaseResult]) -> Table:
    """A line for each target."""
    rows = [_line(result, verdict) for result in results for verdict in result.verdicts]
    return Table("Targets", COLUMNS, tuple(rows), NOTES)


def _line(result: CaseResult, verdict: Verdict) -> tuple[str, ...]:
    target, ratio = verdict.target, verdict.ratio
    head = (result.case.name, target.text, target.wanted)
    if ratio is None:
        word = NOT_RUN if result.stopped and not result.rounds else verdict.word
        return (*head, "-", "-", "0", word)
    extremes = f"{ratio.least:.{DIGITS}f} to {ratio.most:.{DIGITS}f}"
    return (*head, f"{ratio.median:.{DIGITS}f}", extremes, str(ratio.count), verdict.word)


def stops(results: Sequence[CaseResult]) -> list[str]:
    """What did not run, or not to its end, and why: one sentence for each reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if result.stopped:
            count = len(result.rounds)
            ended = f" after {count} round{'s' * (count > 1)}" if count else ""
            reasons[result.stopped].append(result.case.name + ended)
    return [f"Not run, or not to its end: {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def findings(results: Sequence[CaseResult]) -> list[str]:
    """How many targets are met, which are not, and what was not measured."""
    words = [(result.case.name, verdict) for result in results for verdict in result.verdicts]
    met = sum(verdict.word == PASS for _, verdict in words)
    short = [f"{name} ({v.target.title})" for name, v in words if v.word == FALLS_SHORT]
    found = [f"{met} of {met + len(short)} targets that were measured are met."]
    if short:
        found.append(f"Falling short: {'; '.join(short)}.")
    return found + stops(results)


def make(results: Sequence[CaseResult], earlier: Sequence[dict[str, Any]] = ()) -> Report:
    """The whole of it. ``earlier``: what the rounds of earlier sittings were made with."""
    return Report(
        title="OasisKV: targets of speed",
        tables=[table(results)],
        findings=findings(results),
        sections=lambda: page_sections(results),
        data={"kind": KIND, "earlier": list(earlier), "cases": [result.as_dict() for result in results]},
    )


def page_sections(results: Sequence[CaseResult]) -> list[Section]:
    """The page: the table, then what was behind each case's ratios."""
    cases = [
        Section(
            f"{result.case.name}: {result.case.model}",
            [result.case.about, *stops([result])],
            [figures_table(result)],
        )
        for result in results
        if result.rounds
    ]
    return [Section("Targets", tables=[table(results)], plots=[_plot(results)]), *cases]


def figures_table(result: CaseResult) -> Table:
    """A column for each run of a case, a line for each figure."""
    labels = [label for label in result.case.runs if result.of(label)]
    lines = [
        (name, *(spread([getattr(found, figure) for found in result.of(label)]).short(digits) for label in labels))
        for figure, (name, digits) in FIGURES.items()
    ]
    cells = {result.cells[label]["title"]: None for label in labels if label in result.cells}
    return Table("", ("", *map(title, labels)), tuple(lines), "; ".join(cells))


def _plot(results: Sequence[CaseResult]) -> Figure:
    from plotly import graph_objects as go

    shown = [(r.case.name, v.target, v.ratio) for r in results for v in r.verdicts if v.ratio is not None]
    names = [f"{name}<br>{target.text}" for name, target, _ in shown]
    plot = go.Figure(layout={"title": "Ratios, and their bounds", "yaxis": {"title": "ratio", "rangemode": "tozero"}})
    plot.add_bar(
        name="measured",
        x=names,
        y=[ratio.median for _, _, ratio in shown],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [ratio.most - ratio.median for _, _, ratio in shown],
            "arrayminus": [ratio.median - ratio.least for _, _, ratio in shown],
        },
    )
    bounds = [target.bound for _, target, _ in shown]
    plot.add_scatter(name="bound", x=names, y=bounds, mode="markers", marker={"symbol": "line-ew-open", "size": 24})
    return plot
