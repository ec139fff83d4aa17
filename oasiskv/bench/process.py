"""Engines in processes of their own: runs their jobs, and shows how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

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


class EngineProcess:
    """One engine in a process of its own, which stays until it is closed.

    Args:
        job: what it is built for. All that it runs may differ in what is asked only (:attr:`Job.engine_key`).
        title: for people.
        program: what Python runs there.
    """

    def __init__(self, job: Job, title: str, program: Sequence[str] = ("-m", "oasiskv.bench.engine")) -> None:
        self._title = title
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(job),
        )

    def run(self, job: Job, title: str, console: Console) -> Run:
        """Run ``job`` to its end; the first one loads the engine.

        Raises:
            RunFailed: the engine could not start or broke off.
        """
        self._title = title
        columns = (
            SpinnerColumn(),
            TextColumn(f"[bold]{title:17s}[/]"),
            BarColumn(12),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            run = _follow(self._process, job, progress, progress.add_task("loading", total=None))
        if run is None:
            self._process.wait()
            raise self._failed()
        return run

    def close(self) -> None:
        """Let it end, and wait for that.

        Raises:
            RunFailed: it did not end well.
        """
        self._process.communicate()
        with self._log:
            if self._process.returncode != 0:
                raise self._failed()

    def kill(self) -> None:
        """End it at once; it may have ended already."""
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._log.close()

    def _failed(self) -> RunFailed:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split(EXIT_NOISE)[0].splitlines()
        tail = "\n".join(lines[-LOG_TAIL:])
        return RunFailed(f"{self._title}: its process ended with status {self._process.returncode}\n{tail}")


def run_job(job: Job, title: str, console: Console, program: Sequence[str] = ("-m", "oasiskv.bench.engine")) -> Run:
    """Run ``job`` to its end, in a process of its own. ``program``: what Python runs there.

    Raises:
        RunFailed: the engine could not start or broke off.
    """
    process = EngineProcess(job, title, program)
    try:
        run = process.run(job, title, console)
        process.close()
    finally:
        process.kill()
    return run


def environment(job: Job) -> dict[str, str]:
    """The process's environment. Stock vLLM does not even load the plug-in; the job says how large the pool is."""
    return {**inherited(), **({"VLLM_PLUGINS": ""} if job.settings is None else {})}


def inherited() -> dict[str, str]:
    """This process's environment, less what would make an engine's pool another than it is told."""
    return {name: value for name, value in os.environ.items() if name != POOL_VARIABLE}


def _follow(process: subprocess.Popen[str], job: Job, progress: Progress, task: TaskID) -> Run | None:
    """The answer to ``job``; None if the process ends before."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(job.to_json() + "\n")
        process.stdin.flush()
    except BrokenPipeError:  # it is dead already: the log says why
        return None
    prompts = 0 if job.fill else job.prompt_tokens
    outputs = job.output_tokens
    for line in process.stdout:
        event = json.loads(line)
        if "run" in event:
            return Run.from_dict(event["run"])
        now = event["progress"]
        done = min(now["prompt_tokens"], prompts)
        progress.update(
            task,
            total=prompts + DECODE_WEIGHT * outputs,
            completed=done + DECODE_WEIGHT * now["output_tokens"],
            description=(f"prompts {done / prompts:4.0%} " if prompts else "")
            + f"tokens {now['output_tokens']:{len(str(outputs))}d}/{outputs} running {now['running']}",
        )
    return None
