"""Runs one row in a process of its own and shows how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from oasiskv.demo.plan import TITLES, Job
from oasiskv.demo.probe import Outcome

LOG_TAIL = 12
"""Lines of a failed process that are shown."""


class RowFailed(RuntimeError):
    """A row's process ended without a result. The message has its last lines."""


def run_row(job: Job, console: Console) -> Outcome:
    """Run ``job`` to its end.

    Raises:
        RowFailed: the engine could not start or broke off.
    """
    columns = (
        SpinnerColumn(),
        TextColumn(f"[bold]{TITLES[job.row]:17s}[/]"),
        BarColumn(12),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    command = [sys.executable, "-m", "oasiskv.demo.engine"]
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        task = progress.add_task("loading", total=None)
        log = Path(folder) / "log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            try:
                outcome = _follow(process, job, progress, task)
            finally:
                if process.poll() is None:
                    process.terminate()
        if outcome is None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
            raise RowFailed(f"{TITLES[job.row]}: its process ended with status {process.returncode}\n{tail}")
        return outcome


def _follow(process: subprocess.Popen[str], job: Job, progress: Progress, task: object) -> Outcome | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(job.to_json() + "\n")
        process.stdin.close()
    except BrokenPipeError:  # it is dead already: the log says why
        return None
    requests = len(job.facts)
    prompts, outputs = requests * job.prompt_tokens, requests * job.output_tokens
    outcome = None
    for line in process.stdout:
        event = json.loads(line)
        if "outcome" in event:
            outcome = Outcome.from_dict(event["outcome"])
            continue
        now = event["progress"]
        progress.update(
            task,  # type: ignore[arg-type]
            total=prompts + DECODE_WEIGHT * outputs,
            completed=now["prompt_tokens"] + DECODE_WEIGHT * now["output_tokens"],
            description=f"prompts {now['prompt_tokens'] / job.prompt_tokens:.1f}/{requests} "
            f"tokens {now['output_tokens']:3d}/{outputs} running {now['running']}",
        )
    process.wait()
    return outcome if process.returncode == 0 else None


DECODE_WEIGHT = 10
"""What the bar counts an output token for, against a prompt token."""
