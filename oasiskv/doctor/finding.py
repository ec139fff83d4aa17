"""What a check finds, and how checks are run: one that breaks is itself found to be an error, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import oasiskv

GIB = 1 << 30
MIB = 1 << 20


class Level(StrEnum):
    """How bad it is. Only an error keeps OasisKV from working, and decides the exit status."""

    OK = "OK"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    level: Level
    text: str
    fix: str = ""
    """What to do about it; at level OK, what could be done."""


@dataclass(frozen=True)
class Check:
    """Something to look at."""

    topic: str
    name: str
    """Shown while it runs, and in the finding if it breaks."""
    run: Callable[[], Finding]


class Skipped(Exception):
    """Nothing can be said, because of something that another finding reports already."""


def run_checks(checks: Iterable[Check], tell: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Run every check.

    Args:
        checks: in the order of the report.
        tell: called with a check's name before it runs.

    Returns:
        One finding for each check; none for one that was skipped.
    """
    findings = []
    for check in checks:
        tell(check.name)
        try:
            findings.append(check.run())
        except Skipped:
            continue
        except Exception as error:
            text = f"{check.name}: {str(error) or type(error).__name__}"
            fix = "if everything else is OK, this is a fault of OasisKV: please report it with this output"
            findings.append(Finding(check.topic, Level.ERROR, text, fix))
    return findings


def worst(findings: Sequence[Finding]) -> Level:
    """The level of the worst finding; OK if there is none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report for machines: ``{"oasiskv": version, "status": level, "findings": [{topic, level, text, fix}]}``."""
    return {
        "oasiskv": oasiskv.__version__,
        "status": str(worst(findings)),
        "findings": [asdict(finding) for finding in findings],
    }


def gib(number: float) -> str:
    """Bytes in GiB, or MiB where it is less than one GiB."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
