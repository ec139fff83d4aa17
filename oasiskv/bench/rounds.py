"""Rows in turn, several rounds: what is compared is paired within a round, so that a slow minute slows both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oasiskv.bench.cells import Cell
from oasiskv.bench.figures import Figures
from oasiskv.bench.job import DENSE, LIMIT, OASIS, PLUS
from oasiskv.report.statistics import Spread, spread

States = dict[str, int]
"""Most requests at once in each of OasisKV's states."""
RunRow = Callable[[Cell, str, int], tuple[Figures, States]]
"""``(cell, row, batch)`` to what an engine did that knew nothing of what was asked before."""


def paired(rounds: Iterable[tuple[Figures, Figures]], figure: str, by: str = "") -> Spread | None:
    """``figure`` of the first run by ``by`` (the same unless given) of the second, within each round.

    A round in which one of them is 0, not measured, is left out; None if there is no other.
    """
    values = [(getattr(first, figure), getattr(second, by or figure)) for first, second in rounds]
    ratios = [first / second for first, second in values if first and second]
    return spread(ratios) if ratios else None


@dataclass
class CellResult:
    """The figures of each row, round by round; a row that ran in the first rounds only has fewer."""

    cell: Cell
    rows: dict[str, list[Figures]] = field(default_factory=dict)
    states: States = field(default_factory=dict)

    def spread(self, row: str, figure: str) -> Spread:
        """Of one figure of a row, over its rounds."""
        return spread([getattr(found, figure) for found in self.rows[row]])

    def ratio(self, figure: str = "throughput", row: str = OASIS, to: str = DENSE) -> Spread | None:
        """``row`` by ``to``, paired by rounds; None if one of them did not run."""
        return paired(self._pairs(row, to), figure)

    @property
    def efficiency(self) -> Spread | None:
        """OasisKV's step, where every context is longer than the budget, by that of dense vLLM on contexts as long as
        it, same batch: 1 is the best there is. None where no context is longer."""
        return paired(self._pairs(OASIS, LIMIT), "beyond_ms", "step_ms")

    def _pairs(self, row: str, to: str) -> Iterable[tuple[Figures, Figures]]:
        return zip(self.rows.get(row, ()), self.rows.get(to, ()), strict=False)

    def as_dict(self, model: str) -> dict[str, Any]:
        """For JSON."""
        ratios = {"throughput": self.ratio(), "decode_throughput": self.ratio("decode_throughput")}
        return {
            **self.cell.as_dict(),
            "rows": [self._row(row) for row in self.rows],
            "ratios": {name: found.as_dict() for name, found in ratios.items() if found is not None},
            "efficiency": self.efficiency.as_dict() if self.efficiency is not None else None,
            "states": self.states,
        }

    def _row(self, row: str) -> dict[str, Any]:
        names = ("throughput", "decode_throughput", "step_ms", "running")
        return {
            "row": row,
            **{name: self.spread(row, name).as_dict() for name in names},
            "rounds": [found.as_dict() for found in self.rows[row]],
        }


def run_cell(cell: Cell, run_row: RunRow, rounds: int, side_rounds: int, side_rows: Sequence[str]) -> CellResult:
    """Dense, OasisKV, dense, OasisKV...; in the first ``side_rounds`` rounds also the ``side_rows`` (`dense_plus_host`,
    `limit`)."""
    result = CellResult(cell)

    def run(row: str, batch: int = 0) -> Figures:
        found, states = run_row(cell, row, batch)
        result.rows.setdefault(row, []).append(found)
        for state, count in states.items():
            result.states[state] = max(result.states.get(state, 0), count)
        return found

    for number in range(rounds):
        run(DENSE)
        batch = run(OASIS).beyond_batch
        if number < side_rounds:
            if PLUS in side_rows:
                run(PLUS)
            if LIMIT in side_rows and batch:
                run(LIMIT, batch)
    return result
