"""Rows in turn, several rounds: what is compared is paired within a round, so that a slow minute slows both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oasiskv.bench.cells import Cell
from oasiskv.bench.figures import Figures
from oasiskv.bench.job import DENSE, LIMIT, OASIS, PLUS
from oasiskv.report.statistics import Spread, spread

States = dict[str, int]
"""Most requests at once in each of OasisKV's states."""
RunRow = Callable[[Cell, str, int], tuple[Figures, States]]
"""``(cell, row, batch)`` to what a fresh engine did."""


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
        pairs = zip(self.rows.get(row, ()), self.rows.get(to, ()), strict=False)
        ratios = [getattr(a, figure) / getattr(b, figure) for a, b in pairs if getattr(b, figure)]
        return spread(ratios) if ratios else None

    @property
    def efficiency(self) -> Spread | None:
        """OasisKV's step, where every context is longer than the budget, by that of dense vLLM on contexts as long as
        it, same batch: 1 is the best there is. None where no context is longer."""
        ratios = [
            ours.beyond_ms / best.step_ms
            for ours, best in zip(self.rows.get(OASIS, ()), self.rows.get(LIMIT, ()), strict=False)
            if ours.beyond_ms and best.step_ms
        ]
        return spread(ratios) if ratios else None

    def as_dict(self, model: str) -> dict[str, Any]:
        """For JSON."""
        cell, w = self.cell, self.cell.workload
        ratios = {"throughput": self.ratio(), "decode_throughput": self.ratio("decode_throughput")}
        return {
            "title": cell.title,
            "workload": w.name,
            "prompt_tokens": w.prompt,
            "output_tokens": w.output,
            "turns": w.turns,
            "context": w.context,
            "requests": cell.requests,
            "concurrency": cell.concurrency,
            "budget_tokens": cell.budget,
            "settings": cell.settings,
            "pool_bytes": cell.pool_bytes,
            "host_bytes": cell.host_bytes,
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
