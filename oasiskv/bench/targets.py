"""Targets of speed: runs that are compared, played in rounds, and whether the ratios of their figures meet a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oasiskv.bench.cells import Cell, Model
from oasiskv.bench.figures import Figures
from oasiskv.bench.job import DENSE, OASIS
from oasiskv.bench.rounds import States, paired
from oasiskv.bench.runner import Cut
from oasiskv.bench.workloads import slices
from oasiskv.report.statistics import Spread

NOT_RUN, NOT_MEASURED, PASS, FALLS_SHORT = "not run", "not measured", "pass", "falls short"


@dataclass(frozen=True)
class Contender:
    """One of the runs that a case compares: a row of a cell.

    ``batch_of``: the run of the same round whose batch beyond the budget it takes (row `limit` only).
    """

    cell: Callable[[Model], Cell]
    row: str
    batch_of: str = ""


@dataclass(frozen=True)
class Target:
    """A bound of a ratio: ``figure`` (of :class:`Figures`) of the run ``above`` by ``by`` of the run ``below``.

    ``by`` is the same figure unless given. Exactly one of ``at_least`` and ``at_most`` is given.
    """

    text: str
    figure: str
    above: str = OASIS
    below: str = DENSE
    by: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"target {self.text!r}: give one of at_least and at_most")

    @property
    def bound(self) -> float:
        """Either of the two."""
        found = self.at_most if self.at_least is None else self.at_least
        assert found is not None
        return found

    @property
    def wanted(self) -> str:
        """The bound, for people."""
        return f"at {'least' if self.at_least is not None else 'most'} {self.bound:g}"

    @property
    def title(self) -> str:
        """The ratio and its bound, for people."""
        return f"{self.text}: {self.wanted}"

    def is_met(self, ratio: float) -> bool:
        """Whether ``ratio`` keeps the bound."""
        return ratio >= self.bound if self.at_least is not None else ratio <= self.bound


@dataclass(frozen=True)
class Case:
    """Runs by label, and what is wanted of their figures. ``name``: as on the command line; ``model``: a known one.

    ``cut``: how prompts that are read are cut out of the essays.
    """

    name: str
    about: str
    model: str
    runs: Mapping[str, Contender]
    targets: Sequence[Target]
    cut: Cut = slices

    def order(self, number: int) -> list[str]:
        """Labels in the order of a round: reversed in every second one, but what takes a batch follows its giver."""
        leading = [label for label, run in self.runs.items() if not run.batch_of]
        turned = leading[::-1] if number % 2 else leading
        return [label for one in turned for label in (one, *self._followers(one))]

    def _followers(self, label: str) -> list[str]:
        return [other for other, run in self.runs.items() if run.batch_of == label]


@dataclass(frozen=True)
class Measured:
    """What one run did."""

    figures: Figures
    states: States = field(default_factory=dict)


Round = Mapping[str, Measured]
"""Of every run, by label; without those whose giver had no batch beyond the budget."""
Play = Callable[[str, int], Measured]
"""``(label, batch)`` to what an engine that knew nothing did; ``batch`` is 0 where none is taken."""


def play_round(case: Case, number: int, play: Play) -> Round:
    """All runs of a case, one after another."""
    found: dict[str, Measured] = {}
    for label in case.order(number):
        giver = case.runs[label].batch_of
        batch = found[giver].figures.beyond_batch if giver else 0
        if batch or not giver:
            found[label] = play(label, batch)
    return found


@dataclass(frozen=True)
class Verdict:
    """A target and its ratio over the rounds; None if no round has one."""

    target: Target
    ratio: Spread | None

    @property
    def passes(self) -> bool | None:
        """Whether the median meets the bound; None: not measured."""
        return None if self.ratio is None else self.target.is_met(self.ratio.median)

    @property
    def word(self) -> str:
        """For people."""
        return {None: NOT_MEASURED, True: PASS, False: FALLS_SHORT}[self.passes]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.target),
            "ratio": None if self.ratio is None else self.ratio.as_dict(),
            "passes": self.passes,
        }


@dataclass
class CaseResult:
    """The finished rounds of a case. ``cells``: what each run was, by label; ``stopped``: why it did not run, or not to
    its end."""

    case: Case
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    stopped: str = ""

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each target, its ratio paired by rounds."""
        return [Verdict(target, self._ratio(target)) for target in self.case.targets]

    def _ratio(self, target: Target) -> Spread | None:
        complete = [found for found in self.rounds if target.above in found and target.below in found]
        pairs = [(found[target.above].figures, found[target.below].figures) for found in complete]
        return paired(pairs, target.figure, target.by)

    def of(self, label: str) -> list[Figures]:
        """The figures of one run, round by round."""
        return [found[label].figures for found in self.rounds if label in found]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "case": self.case.name,
            "about": self.case.about,
            "model": self.case.model,
            "stopped": self.stopped,
            "runs": {label: self._run(label) for label in self.case.runs},
            "targets": [verdict.as_dict() for verdict in self.verdicts],
        }

    def _run(self, label: str) -> dict[str, Any]:
        return {
            "row": self.case.runs[label].row,
            "cell": self.cells.get(label),
            "rounds": [
                None if label not in found else {**found[label].figures.as_dict(), "states": found[label].states}
                for found in self.rounds
            ],
        }
