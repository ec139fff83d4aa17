"""Rounds, ratios, the crossover: a slow-down that was planted is seen, at its size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_cells import MODEL, SOURCE, cell
from test_drive import Clock, FakeEngine

from oasiskv.bench import report
from oasiskv.bench.cells import ROWS, Cell
from oasiskv.bench.crossover import crossovers
from oasiskv.bench.drive import drive
from oasiskv.bench.figures import Figures, figures
from oasiskv.bench.job import DENSE, LIMIT, OASIS, PLUS, Run
from oasiskv.bench.rounds import CellResult, States, run_cell
from oasiskv.bench.workloads import WORKLOADS
from oasiskv.report.output import Output
from oasiskv.report.provenance import provenance

SMALL = replace(WORKLOADS["long-context"], prompt=400, output=20)
STEP = 0.1
"""Seconds of dense vLLM's step."""


class Engines:
    """Engines whose step takes ``STEP`` times the factor of their row; the machine is slower in every second round."""

    def __init__(self, **factors: float) -> None:
        self.factors = factors
        self.order: list[str] = []

    def __call__(self, cell: Cell, row: str, batch: int) -> tuple[Figures, States]:
        self.order.append(row)
        noise = 1.5 if self.order.count(row) % 2 == 0 else 1.0
        clock, job = Clock(), cell.job(row, MODEL, SOURCE, batch)
        engine = FakeEngine(clock, STEP * self.factors.get(row, 1.0) * noise)
        samples, answers = drive(engine, job.conversations, job.concurrency, clock=clock)
        return figures(Run(row, 32, 100, 1.0, 0, tuple(samples), tuple(answers)), cell.budget), {"bounded_requests": 1}


def measured(rounds: int = 3, side_rounds: int = 1, **factors: float) -> tuple[CellResult, Engines]:
    engines = Engines(**factors)
    return run_cell(cell(SMALL, budget_tokens=256), engines, rounds, side_rounds, (PLUS, LIMIT)), engines


def test_dense_and_oasiskv_run_in_turn_and_the_others_in_the_first_rounds() -> None:
    _, engines = measured(rounds=3, side_rounds=1)
    assert engines.order == [DENSE, OASIS, PLUS, LIMIT, DENSE, OASIS, DENSE, OASIS]


def test_equal_engines_are_equal_however_noisy_the_rounds() -> None:
    result, _ = measured()
    ratio = result.ratio()
    assert ratio is not None and ratio.count == 3
    assert (ratio.least, ratio.median, ratio.most) == (pytest.approx(1),) * 3
    assert result.spread(DENSE, "throughput").least < result.spread(DENSE, "throughput").most


def test_a_planted_slow_down_of_20_percent_is_seen_as_such() -> None:
    result, _ = measured(oasis=1.2)
    for figure in ("throughput", "decode_throughput"):
        ratio = result.ratio(figure)
        assert ratio is not None and ratio.median == pytest.approx(1 / 1.2)
    assert result.efficiency is not None and result.efficiency.median == pytest.approx(1.2)
    assert "OasisKV has 0.83 (0.83 to 0.83) times dense vLLM's throughput" in " ".join(report.findings([result]))


def test_efficiency_is_against_the_limit_with_the_same_batch() -> None:
    result, _ = measured(oasis=0.9, limit=0.5)
    assert result.rows[LIMIT][0].batch == result.rows[OASIS][0].beyond_batch == 4
    assert result.efficiency is not None and result.efficiency.median == pytest.approx(1.8)


# -- crossover


def at(context: int, ratio: float, concurrency: int = 4) -> CellResult:
    sized = replace(cell(replace(SMALL, prompt=context - SMALL.output)), concurrency=concurrency)
    found = Engines(oasis=1 / ratio)
    return run_cell(sized, found, 1, 0, ())


@pytest.mark.parametrize(
    ("ratios", "context", "worst", "words"),
    [
        ((0.8, 1.2), 1414, 0.8, "pays from about 1,414 tokens on; below it is 20% slower at worst"),
        ((1.1, 1.3), 1000, None, "pays at every context measured (1,000 to 2,000 tokens)"),
        ((0.7, 0.9), None, 0.7, "does not pay up to 2,000 tokens (30% slower at worst)"),
        ((1.1, 0.9), None, 0.9, "does not pay up to 2,000 tokens (10% slower at worst)"),
    ],
)
def test_the_crossover(ratios: tuple[float, float], context: float | None, worst: float | None, words: str) -> None:
    (found,) = crossovers([at(2000, ratios[1]), at(1000, ratios[0])])
    assert found.context == (None if context is None else pytest.approx(context, abs=1))
    assert found.worst == (None if worst is None else pytest.approx(worst))
    assert words in found.sentence()


def test_there_is_a_crossover_for_each_number_at_once_and_none_of_a_single_context() -> None:
    results = [at(n, 1.1, concurrency=c) for n in (1000, 2000) for c in (1, 4)] + [at(1000, 1.0, concurrency=2)]
    assert sorted(found.concurrency for found in crossovers(results)) == [1, 4]


# -- the report


def test_the_table_has_a_column_for_each_engine_and_fits_a_terminal() -> None:
    result, _ = measured()
    found = report.table(result)
    assert len(found.columns) == 1 + len(ROWS)
    assert all(len(row) == len(found.columns) for row in found.rows)
    names = [row[0].strip() for row in found.rows]
    assert {"tokens/s, whole run", "step, ms", "first token, s, p50", "p99", "running at once"} <= set(names)
    assert found.markdown().count("\n") == len(found.rows) + 1


def test_the_json_holds_every_round_and_what_it_was_made_with(tmp_path: Path) -> None:
    result, _ = measured()
    path = tmp_path / "numbers" / "bench.json"
    made = provenance(["oasiskv", "bench"])
    Output(None, path, False).deliver(report.make("small", [result]), made, Console(quiet=True))
    found: dict[str, Any] = json.loads(path.read_text())
    (one,) = found["cells"]
    assert found["kind"] == "bench" and found["made"]["command"] == "oasiskv bench"
    assert {row["row"]: len(row["rounds"]) for row in one["rows"]} == {DENSE: 3, OASIS: 3, PLUS: 1, LIMIT: 1}
    assert set(one["rows"][0]["throughput"]) == {"median", "least", "most", "count"}
    assert one["ratios"]["throughput"]["median"] == pytest.approx(1)
    assert one["efficiency"]["median"] == pytest.approx(1)
