"""A benchmark's tables, sentences, plots and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oasiskv.bench.cells import TITLES
from oasiskv.bench.crossover import crossovers
from oasiskv.bench.figures import PERCENTILES
from oasiskv.bench.job import DENSE, LIMIT, OASIS, PLUS
from oasiskv.bench.rounds import CellResult
from oasiskv.report.output import Report
from oasiskv.report.page import Section
from oasiskv.report.statistics import spread
from oasiskv.report.table import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MIB = 1 << 20
Text = Callable[[CellResult, str], str]
"""One line's cell, for a row."""
NOTES = (
    "Medians (least to most) over the rounds. Step: the median of those that only decode with the usual batch. "
    "Percentiles are over requests, medians over rounds. Fetched: from the host pool, by steps in which some request "
    "decodes; pipeline: scoring and planning, in whichever thread, by the time of those steps."
)


def table(result: CellResult) -> Table:
    """One cell: a column for each engine, a line for each figure."""
    rows = list(result.rows)
    lines = [(name, *(text(result, row) for row in rows)) for name, text in LINES.items()]
    ratios = {"throughput": "tokens/s by dense", "decode_throughput": "  decoding, by dense"}
    for figure, name in ratios.items():
        found = [result.ratio(figure, row) if row in (OASIS, PLUS) else None for row in rows]
        lines.append((name, *(ratio.short(2) if ratio is not None else "-" for ratio in found)))
    steps = [result.efficiency if row == OASIS else None for row in rows]
    lines.append(("step by the limit's", *(step.short(2) if step is not None else "-" for step in steps)))
    shown = [line for line in lines if any(cell != "-" for cell in line[1:])]
    return Table(result.cell.title, ("", *(TITLES[row] for row in rows)), tuple(shown), NOTES)


def _pool(result: CellResult, row: str) -> str:
    cell = result.cell
    return {
        DENSE: f"{cell.pool_bytes / MIB:,.0f} MiB",
        OASIS: f"{cell.pool_bytes / MIB:,.0f} MiB + host {cell.host_bytes / MIB:,.0f}",
        PLUS: f"{(cell.pool_bytes + cell.host_bytes) / MIB:,.0f} MiB",
        LIMIT: "as needed",
    }[row]


def _figure(name: str, digits: int = 1, scale: float = 1.0) -> Text:
    def text(result: CellResult, row: str) -> str:
        found = result.spread(row, name)
        return found.short(digits, scale) if found.most else "-"

    return text


def _percentile(name: str, which: int, digits: int, scale: float = 1.0) -> Text:
    def text(result: CellResult, row: str) -> str:
        return spread([getattr(found, name)[which] for found in result.rows[row]]).short(digits, scale)

    return text


def _whole_run(name: str, digits: int = 1) -> Text:
    """Not for the limit, which answers other prompts."""
    inner = _figure(name, digits)
    return lambda result, row: "-" if row == LIMIT else inner(result, row)


LINES: dict[str, Text] = {
    "KV pool": _pool,
    "tokens/s, whole run": _whole_run("throughput"),
    "tokens/s, decoding": _figure("decode_throughput"),
    "step, ms": _figure("step_ms", 0),
    "  its batch": _figure("batch", 0),
    "  its scheduler, ms": _figure("scheduler_ms", 2),
    "running at once": _figure("running", 0),
    "first token, s, p50": _percentile("ttft", 0, 1),
    "  p95": _percentile("ttft", 1, 1),
    "  p99": _percentile("ttft", 2, 1),
    "ms per token, p50": _percentile("tpot", 0, 0, 1e3),
    "  p95 ": _percentile("tpot", 1, 0, 1e3),
    "  p99 ": _percentile("tpot", 2, 0, 1e3),
    "preemptions": _figure("preemptions", 0),
    "fetched, MiB/step": _figure("fetched_per_step", 1, 1 / MIB),
    "pipeline, % of step": _figure("pipeline_share", 0, 100),
}
"""The table's lines."""


def sentences(result: CellResult) -> list[str]:
    """What a cell says."""
    whole, decoding = result.ratio(), result.ratio("decode_throughput")
    found = []
    if whole is not None:
        also = f", {decoding.text(2)} times while decoding only" if decoding is not None else ""
        rounds = "1 round" if whole.count == 1 else f"{whole.count} rounds, paired"
        found.append(
            f"{result.cell.workload.name}: OasisKV has {whole.text(2)} times dense vLLM's throughput{also} ({rounds})."
        )
    if result.efficiency is not None:
        batch = result.rows[LIMIT][0].batch
        found.append(
            f"{result.cell.workload.name}: its step takes {result.efficiency.text(2)} times that of dense vLLM on "
            f"contexts as long as the budget, {batch} requests (1 is the best there is)."
        )
    added = result.ratio("throughput", PLUS)
    if added is not None:
        found.append(
            f"{result.cell.workload.name}: dense vLLM with the host pool's memory added to its own has "
            f"{added.text(2)} times its throughput."
        )
    return found


def findings(results: Sequence[CellResult]) -> list[str]:
    """What all cells say, and the crossovers."""
    found = [sentence for result in results for sentence in sentences(result)]
    return found + [line.sentence() + "." for line in crossovers(results)]


def make(model: str, results: Sequence[CellResult]) -> Report:
    """The whole of it."""
    return Report(
        title=f"OasisKV beside dense vLLM: {model}",
        tables=[table(result) for result in results],
        findings=findings(results),
        sections=lambda: page_sections(results),
        data=as_json(model, results),
    )


def as_json(model: str, results: Sequence[CellResult]) -> dict[str, Any]:
    """All numbers."""
    lines = [
        {
            "workload": line.workload,
            "budget_tokens": line.budget,
            "concurrency": line.concurrency,
            "points": [list(p) for p in line.points],
            "context": line.context,
            "worst": line.worst,
        }
        for line in crossovers(results)
    ]
    return {
        "kind": "bench",
        "model": model,
        "cells": [result.as_dict(model) for result in results],
        "crossovers": lines,
    }


def page_sections(results: Sequence[CellResult]) -> list[Section]:
    """The page: an overview, a section for each cell, and the sweep if there is one."""
    sections = [Section("Throughput", plots=[_bars(results, "throughput"), _bars(results, "decode_throughput")])]
    lines = crossovers(results)
    if lines:
        sections.append(
            Section("Where it pays", [line.sentence() + "." for line in lines], plots=[_crossover_plot(results)])
        )
    for result in results:
        plots = [
            _latency(result, "tpot", 1e3, "milliseconds per output token"),
            _latency(result, "ttft", 1.0, "seconds to the first token"),
        ]
        sections.append(Section(result.cell.title, sentences(result), [table(result)], plots))
    return sections


def _bars(results: Sequence[CellResult], figure: str) -> Figure:
    from plotly import graph_objects as go

    names = {"throughput": "Output tokens per second, whole run", "decode_throughput": "…in steps that only decode"}
    plot = go.Figure(layout={"title": names[figure], "barmode": "group", "yaxis": {"title": "tokens/s"}})
    shown = [_short(result) for result in results]
    for row in TITLES:
        spreads = [result.spread(row, figure) if row in result.rows else None for result in results]
        if not any(spreads) or (row == LIMIT and figure == "throughput"):
            continue
        plot.add_bar(
            name=TITLES[row],
            x=shown,
            y=[s.median if s else None for s in spreads],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [s.most - s.median if s else 0 for s in spreads],
                "arrayminus": [s.median - s.least if s else 0 for s in spreads],
            },
        )
    return plot


def _short(result: CellResult) -> str:
    w = result.cell.workload
    return (
        f"{w.name}<br>{w.prompt:,} + {w.output:,}, {result.cell.concurrency} at once<br>budget {result.cell.budget:,}"
    )


def _crossover_plot(results: Sequence[CellResult]) -> Figure:
    from plotly import graph_objects as go

    plot = go.Figure(
        layout={
            "title": "OasisKV's throughput by dense vLLM's, same KV pool",
            "xaxis": {"title": "context, tokens", "type": "log"},
            "yaxis": {"title": "ratio", "rangemode": "tozero"},
        }
    )
    for line in crossovers(results):
        x, y = zip(*line.points, strict=True)
        plot.add_scatter(x=x, y=y, mode="lines+markers", name=line.name)
    plot.add_hline(y=1, line_dash="dot")
    return plot


def _latency(result: CellResult, figure: str, scale: float, unit: str) -> Figure:
    from plotly import graph_objects as go

    plot = go.Figure(layout={"title": unit.capitalize(), "barmode": "group", "yaxis": {"title": unit}})
    for row in result.rows:
        if row == LIMIT:
            continue
        rounds = [getattr(found, figure) for found in result.rows[row]]
        medians = [scale * statistics.median(found[i] for found in rounds) for i in range(len(PERCENTILES))]
        plot.add_bar(name=TITLES[row], x=[f"p{p}" for p in PERCENTILES], y=medians)
    return plot
