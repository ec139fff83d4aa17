"""Runs one job in a process of its own and shows how far it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from oasiskv.bench.job import Job, Run

LOG_TAIL = 12
"""Lines of a failed process that are shown."""
EXIT_NOISE = "nanobind: leaked"
"""Where a library begins to count what was left at exit: nothing after it says why."""
DECODE_WEIGHT = 10
"""What the bar counts an output token for, against a prompt token."""


POOL_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""On a CPU it would overrule the pool that a job has."""


class RunFailed(RuntimeError):
    """An engine's process ended without a result. The message has its last lines."""


def run_job(job: Job, title: str, console: Console, program: Sequence[str] = ("-m", "oasiskv.bench.engine")) -> Run:
    """Run ``job`` to its end, in a fresh process. ``program``: what Python runs there.

    Raises:
        RunFailed: the engine could not start or broke off.
    """
    columns = (
        SpinnerColumn(),
        TextColumn(f"[bold]{title:17s}[/]"),
        BarColumn(12),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    command = [sys.executable, *program]
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        task = progress.add_task("loading", total=None)
        log = Path(folder) / "log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(job),
            ) as process,
        ):
            try:
                run = _follow(process, job, progress, task)
            finally:
                if process.poll() is None:
                    process.terminate()
        if run is None:
            lines = log.read_text(errors="replace").split(EXIT_NOISE)[0].splitlines()
            tail = "\n".join(lines[-LOG_TAIL:])
            raise RunFailed(f"{title}: its process ended with status {process.returncode}\n{tail}")
        return run


def environment(job: Job) -> dict[str, str]:
    """The process's environment. Stock vLLM does not even load the plug-in; the job says how large the pool is."""
    return {**inherited(), **({"VLLM_PLUGINS": ""} if job.settings is None else {})}


def inherited() -> dict[str, str]:
    """This process's environment, less what would make an engine's pool another than it is told."""
    return {name: value for name, value in os.environ.items() if name != POOL_VARIABLE}


def _follow(process: subprocess.Popen[str], job: Job, progress: Progress, task: object) -> Run | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(job.to_json() + "\n")
        process.stdin.close()
    except BrokenPipeError:  # it is dead already: the log says why
        return None
    prompts = 0 if job.fill else job.prompt_tokens
    outputs = job.output_tokens
    run = None
    for line in process.stdout:
        event = json.loads(line)
        if "run" in event:
            run = Run.from_dict(event["run"])
            continue
        now = event["progress"]
        done = min(now["prompt_tokens"], prompts)
        progress.update(
            task,  # type: ignore[arg-type]
            total=prompts + DECODE_WEIGHT * outputs,
            completed=done + DECODE_WEIGHT * now["output_tokens"],
            description=(f"prompts {done / prompts:4.0%} " if prompts else "")
            + f"tokens {now['output_tokens']:{len(str(outputs))}d}/{outputs} running {now['running']}",
        )
    process.wait()
    return run if process.returncode == 0 else None
