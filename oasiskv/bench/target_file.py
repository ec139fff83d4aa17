"""Targets in a file: a measurement of hours goes on where an earlier sitting ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.bench.cells import AUTO, BenchError, dtype_of
from oasiskv.bench.figures import Figures
from oasiskv.bench.target_report import KIND
from oasiskv.bench.targets import Case, CaseResult, Measured, Round
from oasiskv.report.provenance import Provenance

SAME = ("commit", "versions", "processor", "cores")
"""What rounds that are put together must have in common."""


@dataclass(frozen=True)
class Earlier:
    """What earlier sittings left, and what they were made with."""

    results: tuple[CaseResult, ...] = ()
    made: tuple[dict[str, Any], ...] = ()


def read(path: Path, cases: Mapping[str, Case], made: Provenance, dtype: str = AUTO) -> Earlier:
    """What the file of an earlier sitting holds; nothing if there is no such file yet.

    Raises:
        BenchError: it holds something else, or was made with other code, on another machine than ``made`` or with
            another dtype.
    """
    if not path.exists():
        return Earlier()
    fix = "name another file, which need not exist"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["kind"] != KIND:
            raise ValueError(f"its kind is {found['kind']!r}")
        past = found["made"]
        results = tuple(_result(cases[kept["case"]], kept) for kept in found["cases"])
        sittings = (*found["earlier"], past)
        dtypes = [dtype_of(cell["options"]) for result in results for cell in result.cells.values()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"--resume {path}: not a file that this version of oasiskv bench targets has written "
            f"({type(error).__name__}: {error}); {fix}"
        ) from None
    now = made.as_dict()
    for name in SAME:
        if past[name] != now[name]:
            raise BenchError(
                f"--resume {path}: its rounds were made with {name} {past[name]}, now it is {now[name]}: their ratios "
                f"do not belong together; {fix}"
            )
    if made.commit.endswith("+"):
        raise BenchError(
            f"--resume {path}: files differ from the commit {made.commit[:-1]}, so nobody can say what these rounds "
            f"were made with; commit the changes, or {fix}"
        )
    for kept in dtypes:
        if kept != dtype:
            raise BenchError(
                f"--resume {path}: its rounds were made with --dtype {kept}, now it is {dtype}: their ratios do not "
                f"belong together; give --dtype {kept}, or {fix}"
            )
    return Earlier(results, sittings)


def _result(case: Case, kept: Mapping[str, Any]) -> CaseResult:
    runs: Mapping[str, Any] = kept["runs"]
    if set(runs) != set(case.runs):
        raise ValueError(f"{case.name} has the runs {', '.join(runs)}")
    rounds: list[Round] = []
    for played in zip(*(runs[label]["rounds"] for label in case.runs), strict=True):
        rounds.append({label: _measured(one) for label, one in zip(case.runs, played, strict=True) if one is not None})
    cells = {label: run["cell"] for label, run in runs.items() if run["cell"] is not None}
    return CaseResult(case, cells, rounds, kept["stopped"])


def _measured(kept: Mapping[str, Any]) -> Measured:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()}
    states = values.pop("states")
    return Measured(Figures(**values), states)
