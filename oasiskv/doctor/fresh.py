"""What torch and vLLM say of this machine, asked in a fresh Python: an import that dies or hangs there is a finding.

The other side is ``sections``, which says in lines of JSON which section it begins, and what comes of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from oasiskv.doctor.finding import Skipped

SECTIONS = "oasiskv.doctor.sections"
LIMIT_SECONDS = 300.0
"""For the whole probe: vLLM's import takes ten seconds on a fast disk, a minute on a slow one."""


class ProbeError(RuntimeError):
    """A section failed; the message is what it failed with."""


class Answers:
    """The facts of each section by its name; a section that has none raises what a check should do."""

    def __init__(self, lines: Sequence[Mapping[str, Any]], ending: str = "") -> None:
        """Take the probe's ``lines``, and if it did not come to its end, what ended it."""
        self._lines = {line["section"]: line for line in lines}  # a section's last line counts
        self._ending = ending

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        """The facts of ``section``.

        Raises:
            ProbeError: it failed, or the probe died in it.
            Skipped: it was not tried, because another one failed.
        """
        line = self._lines.get(section, {"needs": "another"} if self._lines else {})
        if "error" in line:
            raise ProbeError(line["error"])
        if "needs" in line:
            raise Skipped
        if "facts" not in line:
            raise ProbeError(self._ending)
        facts: Mapping[str, Any] = line["facts"]
        return facts

    def known(self, section: str) -> Mapping[str, Any]:
        """The facts of ``section``, empty where there are none for whatever reason."""
        facts: Mapping[str, Any] = self._lines.get(section, {}).get("facts", {})
        return facts


def ask(model: str | None = None, *, module: str = SECTIONS, limit_seconds: float = LIMIT_SECONDS) -> Answers:
    """Run the probe, offline.

    Args:
        model: a name or folder as vLLM takes it, whose configuration is to be checked too.
        module: what to run; a test gives another.
        limit_seconds: how long it may take.
    """
    command = [sys.executable, "-P", "-m", module, *([model] if model is not None else [])]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet}
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_seconds, env=environment)
    except subprocess.TimeoutExpired as late:
        return Answers(_parse(late.stdout or b""), f"no answer within {limit_seconds:.0f} s")
    if done.returncode == 0:
        return Answers(_parse(done.stdout))
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return Answers(_parse(done.stdout), "; ".join([_how_it_ended(done.returncode), *last]))


def _parse(output: bytes) -> list[dict[str, Any]]:
    """Whole lines only: the last one may have been cut off."""
    whole, _, _ = output.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"Python died here with {signal.Signals(-status).name}"
    return f"Python ended here with status {status}"
