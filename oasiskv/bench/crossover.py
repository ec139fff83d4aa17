"""From which context on OasisKV pays, and what it costs below: read off a sweep."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from oasiskv.bench.rounds import CellResult


@dataclass(frozen=True)
class Crossover:
    """For one workload, budget and number of requests at once.

    ``points``: (context in tokens, throughput by dense vLLM's), contexts rising; where contexts are filled, throughput
    is that of the decode steps. ``context``: from here on it pays, by logarithmic interpolation between two points; the
    first point where it pays at every one; None where it pays at none, or stops paying again. ``worst``: the least
    ratio where it does not pay; None if it always does.
    """

    workload: str
    budget: int
    concurrency: int
    points: tuple[tuple[int, float], ...]
    context: float | None
    worst: float | None

    @property
    def name(self) -> str:
        """What is held fixed along the line."""
        return f"{self.workload}, {self.concurrency} at once, budget {self.budget:,}"

    def sentence(self) -> str:
        """For people."""
        where = f"{self.name}: "
        first, last = self.points[0][0], self.points[-1][0]
        if self.worst is None:
            return where + f"pays at every context measured ({first:,} to {last:,} tokens)"
        cost = f"{1 - self.worst:.0%} slower at worst"
        if self.context is None:
            return where + f"does not pay up to {last:,} tokens ({cost})"
        return where + f"pays from about {self.context:,.0f} tokens on; below it is {cost}"


def crossovers(results: Sequence[CellResult]) -> list[Crossover]:
    """One for each workload, budget and concurrency that was measured at two contexts or more."""
    lines: dict[tuple[str, int, int], list[tuple[int, float]]] = defaultdict(list)
    for result in results:
        cell = result.cell
        ratio = result.ratio("decode_throughput" if cell.workload.fill else "throughput")
        if ratio is not None:
            lines[cell.workload.name, cell.budget, cell.concurrency].append((cell.workload.context, ratio.median))
    return [_find(*key, sorted(points)) for key, points in lines.items() if len({p[0] for p in points}) > 1]


def _find(workload: str, budget: int, concurrency: int, points: list[tuple[int, float]]) -> Crossover:
    losing = [i for i, (_, ratio) in enumerate(points) if ratio < 1]
    worst = min((points[i][1] for i in losing), default=None)
    context: float | None
    if not losing:
        context = points[0][0]
    elif losing[-1] == len(points) - 1:
        context = None
    else:
        (x0, y0), (x1, y1) = points[losing[-1]], points[losing[-1] + 1]
        share = (1 - y0) / (y1 - y0)
        context = math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
    return Crossover(workload, budget, concurrency, tuple(points), context, worst)
