"""``oasiskv plan --check results.json``: what a plan predicts beside what ``oasiskv bench`` measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from oasiskv.cli.options import UsageError
from oasiskv.cli.plan_case import Request, load_shape, make_scorer_for, measured_device
from oasiskv.core.capacity import SummaryBytes, Workload
from oasiskv.core.devices import GIB, Device
from oasiskv.core.model_shape import ModelShape
from oasiskv.core.plan import Case, Side, make_plan
from oasiskv.core.settings import Settings, SettingsError

if TYPE_CHECKING:
    from oasiskv.core.scorers import Scorer

TITLES = {"dense": "stock vLLM", "oasis": "OasisKV", "dense_plus_host": "stock vLLM, host memory added"}
"""Rows of a benchmark that a plan predicts."""
FIELDS = ["workload", "prompt_tokens", "output_tokens", "requests", "concurrency", "budget_tokens"]
FIELDS += ["pool_bytes", "host_bytes", "rows"]
NOTES = (
    "Predicted | measured (median of the rounds). Running: most at any step; where answers are long, vLLM begins more "
    "requests than fit at their end, and preempts. tokens/s: in steps that compute no prompt."
)


@dataclass(frozen=True)
class Pair:
    """One figure, predicted and measured (None: not measured)."""

    predicted: float
    measured: float | None


@dataclass(frozen=True)
class Line:
    """One row of a cell."""

    row: str
    running: Pair
    tokens_per_second: Pair
    step_ms: Pair


@dataclass(frozen=True)
class Compared:
    """One cell of a benchmark. ``ratio``: decode throughput of OasisKV by that of stock vLLM."""

    title: str
    lines: tuple[Line, ...]
    ratio: Pair | None
    refused: str = ""
    """Why the plan says nothing of it."""


def read_results(path: Path) -> dict[str, Any]:
    """What ``oasiskv bench --json`` wrote.

    Raises:
        UsageError: the file is missing, or is not that.
    """
    way_out = f"make one with: oasiskv bench --json {path}"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--check {path} cannot be read: {error.strerror}; {way_out}") from None
    except ValueError as error:
        raise UsageError(f"--check {path} is not JSON: {error}; {way_out}") from None
    if not isinstance(found, dict) or found.get("kind") != "bench":
        raise UsageError(f"--check {path} was not written by oasiskv bench; {way_out}")
    if not isinstance(found.get("model"), str) or not found.get("cells"):
        raise UsageError(f"--check {path} has no model or no cells; {way_out}")
    for cell in found["cells"]:
        missing = [name for name in FIELDS if name not in cell]
        if missing:
            raise UsageError(f"--check {path}: a cell lacks {', '.join(missing)}; {way_out}")
    return found


def compare(results: dict[str, Any], request: Request) -> list[Compared]:
    """Plan every cell: the model (unless one is given), the load, settings and pools are the file's.

    Raises:
        SettingsError, UsageError, FetchError: the model or the device cannot be planned.
    """
    args = request.args
    shape = load_shape(args.model or results["model"], args)
    devices: dict[tuple[str, str], Device] = {}
    compared = []
    for cell in results["cells"]:
        own = cell.get("settings") or {"budget_tokens": cell["budget_tokens"]}
        settings = Settings.parse({**own, **request.settings})
        scorer = make_scorer_for(shape, settings)
        kind = (settings.scorer, settings.summary_dtype)
        if kind not in devices:
            devices[kind] = measured_device(args, shape, scorer)
        compared.append(_compare(cell, request, shape, settings, devices[kind], scorer))
    return compared


def _compare(
    cell: dict[str, Any], request: Request, shape: ModelShape, settings: Settings, device: Device, scorer: Scorer
) -> Compared:
    load = _load(cell, request)
    shape = replace(shape, max_context=max(shape.max_context, load.end))  # a benchmark may stretch it
    title = f"{cell['workload']}: {load.prompt_tokens:,} + {load.output_tokens:,} tokens, {load.concurrency} at once"
    block_size = request.args.block_size or device.oasis_block
    case = Case(
        shape=shape,
        device=device,
        load=load,
        settings=settings,
        summary=SummaryBytes.of(scorer, block_size),
        pool_bytes=cell["pool_bytes"],
        stock_block=device.stock_block,
        oasis_block=block_size,
        host_bytes=cell["host_bytes"],
    )
    title += f", budget {settings.budget_tokens:,}, KV pool {cell['pool_bytes'] / GIB:.2f} GiB"
    try:
        plan = make_plan(case)
    except SettingsError as error:
        return Compared(title, (), None, str(error))
    measured = {row["row"]: row for row in cell["rows"]}
    sides = {"dense": plan.dense, "oasis": plan.oasis, "dense_plus_host": plan.pooled}
    lines = [_line(name, side, measured.get(name, {})) for name, side in sides.items() if side is not None]
    speeds = [_median(measured.get(name, {}), "decode_throughput") for name in ("oasis", "dense")]
    ratio = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
    return Compared(title, tuple(lines), Pair(plan.ratio, ratio))


def _load(cell: dict[str, Any], request: Request) -> Workload:
    output = cell["output_tokens"]
    prompt = cell["context"] - output if cell.get("turns", 1) > 1 else cell["prompt_tokens"]  # the last turn's
    args = request.args
    drafts = {"draft_tokens": args.draft_tokens, "acceptance": args.acceptance}
    return Workload(prompt, output, min(cell["concurrency"], cell["requests"]), **drafts, mfu=args.mfu)


def _line(name: str, side: Side, measured: dict[str, Any]) -> Line:
    return Line(
        name,
        Pair(side.running, _median(measured, "running")),
        Pair(side.tokens_per_second, _median(measured, "decode_throughput")),
        Pair(1e3 * side.step.seconds, _median(measured, "step_ms")),
    )


def _median(row: dict[str, Any], figure: str) -> float | None:
    found = row.get(figure)
    return float(found["median"]) if found else None


def show(console: Console, compared: Sequence[Compared]) -> None:
    """Print one table for each cell."""
    for cell in compared:
        console.print(cell.title, highlight=False)
        if cell.refused:
            console.print(f"  no prediction: {cell.refused}", highlight=False, markup=False)
            continue
        console.print(_table(cell), highlight=False)
    console.print(NOTES, highlight=False)


def _table(cell: Compared) -> Table:
    table = Table("", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("running\npredicted | measured", "tokens/s, decoding", "ms/step"):
        table.add_column(column, justify="right")
    for line in cell.lines:
        figures = (_text(line.running, 0), _text(line.tokens_per_second, 1), _text(line.step_ms, 0))
        table.add_row(TITLES[line.row], *figures)
    if cell.ratio is not None:
        table.add_row("OasisKV / stock vLLM", "", _text(cell.ratio, 2), "")
    return table


def _text(pair: Pair, digits: int) -> str:
    measured = "-" if pair.measured is None else f"{pair.measured:,.{digits}f}"
    return f"{pair.predicted:,.{digits}f} | {measured}"
