"""Medians and their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """Median and extremes of what was measured several times."""

    median: float
    least: float
    most: float
    count: int = 1

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """``12.3 (11.9 to 12.8)``; the median alone if it was measured once."""
        median, least, most = (f"{scale * value:,.{digits}f}" for value in (self.median, self.least, self.most))
        return median if self.count == 1 else f"{median} ({least} to {most})"

    def short(self, digits: int = 1, scale: float = 1.0) -> str:
        """``12.3 (11.9-12.8)``, for the cells of a table; no extremes where they say nothing more."""
        shown = [f"{scale * value:,.{digits}f}" for value in (self.median, self.least, self.most)]
        return shown[0] if len(set(shown)) == 1 else f"{shown[0]} ({shown[1]}-{shown[2]})"

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(float(statistics.median(values)), float(min(values)), float(max(values)), len(values))
