"""Engines in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from oasiskv.bench.cells import Cell, Model, make_cell
from oasiskv.bench.engine_pool import EnginePool
from oasiskv.bench.figures import Figures, figures
from oasiskv.bench.job import DENSE, LIMIT, OASIS
from oasiskv.bench.process import RunFailed, run_job
from oasiskv.bench.rounds import States, run_cell
from oasiskv.bench.workloads import WORKLOADS, random_tokens

QUIET = Console(quiet=True)
SETTINGS = {"budget_tokens": 256, "residency": "bounded"}
PLANTED = """
import time
from oasiskv.bench import engine

step = engine.Engine.step

def slow(self):
    began = time.perf_counter()
    found = step(self)
    ends = time.perf_counter() + 0.2 * (time.perf_counter() - began)
    while time.perf_counter() < ends:
        pass
    return found

engine.Engine.step = slow
engine.main()
"""
"""An engine whose every step takes 20 % longer."""


def tiny(folder: Path) -> Model:
    return Model.of("tiny", str(folder), json.loads((folder / "config.json").read_text()))


def small_cell(model: Model, output: int) -> Cell:
    workload = replace(WORKLOADS["decode"], prompt=600, output=output)
    return make_cell(model, workload, 4, 4, SETTINGS, 3 * 640 * model.token_bytes, options=("--enforce-eager",))


def test_dense_oasiskv_and_the_limit_answer_everything(tiny_llama: Path) -> None:
    model = tiny(tiny_llama)
    cell, source = small_cell(model, 24), random_tokens(model.vocabulary)
    batch = 0
    for row in (DENSE, OASIS, LIMIT):
        run = run_job(cell.job(row, model, source, batch), row, QUIET)
        found = figures(run)
        batch = batch or found.batch
        assert len(run.answers) == (4 if row != LIMIT else batch)
        assert all(answer.tokens == (24 if row != LIMIT else 40) for answer in run.answers)
        assert found.throughput > 0 and found.batch > 0
        assert 0 < found.scheduler_ms < found.step_ms
        assert (found.fetched_per_step > 0, found.pipeline_share > 0) == (row == OASIS, row == OASIS)
        assert run.states.get("bounded_requests", 0) == (4 if row == OASIS else 0)


@pytest.mark.parametrize("row", [DENSE, OASIS])
def test_an_engine_that_stays_has_forgotten_all_that_was_asked_before(row: str, tiny_llama: Path) -> None:
    """Read, not filled: the second job computes its prompts again, and answers the same."""
    model = tiny(tiny_llama)
    workload = replace(WORKLOADS["long-context"], prompt=600, output=24)
    pool = 3 * 640 * model.token_bytes
    cell = make_cell(model, workload, 4, 4, SETTINGS, pool, options=("--enforce-eager",))
    job = cell.job(row, model, random_tokens(model.vocabulary))
    with EnginePool(QUIET) as engines:
        first, second = (engines.run(job, row) for _ in range(2))
    assert first.load_seconds == second.load_seconds  # loaded once
    assert [a.name for a in first.answers] == [a.name for a in second.answers]
    for run in (first, second):
        assert sum(sample.prefilled for sample in run.samples) >= 4 * 600
    assert first.states == second.states


def test_an_engine_that_cannot_start_says_why(tiny_llama: Path) -> None:
    model = tiny(tiny_llama)
    job = small_cell(model, 4).job(DENSE, model, random_tokens(model.vocabulary))
    with pytest.raises(RunFailed, match=r"(?s)dense: its process ended with status 2.*--no-such-option"):
        run_job(replace(job, options=("--no-such-option",)), "dense", QUIET)


@pytest.mark.slow
def test_a_slow_down_that_is_planted_in_the_real_engine_is_seen(tiny_llama: Path) -> None:
    """The size of it is worked out from a clock that a test can read (test_rounds); here it must only be seen."""
    model = tiny(tiny_llama)
    source = random_tokens(model.vocabulary)

    def run_row(cell: Cell, row: str, batch: int) -> tuple[Figures, States]:
        program = ("-c", PLANTED) if row == OASIS else ("-m", "oasiskv.bench.engine")
        run = run_job(cell.job(OASIS, model, source), row, QUIET, program)
        return figures(run), run.states

    ratio = run_cell(small_cell(model, 200), run_row, rounds=5, side_rounds=0, side_rows=()).ratio("decode_throughput")
    assert ratio is not None
    print(f"with a step 20 % slower, throughput is {ratio.text(3)}: expected is 0.833")
    assert ratio.median < 0.92
