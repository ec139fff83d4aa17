"""``oasiskv doctor [MODEL]``: the checks put together, shown as a table or written as JSON."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

import oasiskv
from oasiskv.cli.options import UsageError
from oasiskv.cli.repair import broken_packages
from oasiskv.core import container
from oasiskv.doctor import cores, extras, memory, plugin, software
from oasiskv.doctor.finding import Check, Finding, Level, Skipped, as_json, run_checks, worst
from oasiskv.doctor.fresh import Answers, ask
from oasiskv.models import KNOWN, cache_dir, is_fetched, path

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DEFAULT_UTILIZATION = 0.92
"""vLLM's ``gpu_memory_utilization``, where it could not be asked."""
Named = tuple[str, Callable[[], Finding]]


def checks(environment: Mapping[str, str], model: str | None = None) -> list[Check]:
    """Every check, in the order of the report; nothing is looked at before it runs."""
    answers = cache(lambda: ask(_to_load(model)))
    topics: dict[str, Sequence[Named]] = {
        software.TOPIC: _software(answers),
        plugin.TOPIC: _plugin(environment, answers),
        memory.TOPIC: _memory(environment, answers),
        cores.TOPIC: _cores(environment, answers),
        "links": [("copy rates", lambda: extras.link(answers()))],
        "optional": [(name, partial(extras.optional, name)) for name in extras.OPTIONAL],
    }
    if model is not None:
        topics["model"] = [("the model's configuration", partial(_model, model, answers))]
    return [Check(topic, name, run) for topic, named in topics.items() for name, run in named]


def _software(answers: Callable[[], Answers]) -> list[Named]:
    return [
        ("Python", lambda: software.python(sys.version_info[:3])),
        ("OasisKV", software.ourselves),
        ("torch", lambda: software.torch(answers())),
        ("transformers", lambda: software.transformers(answers())),
        ("vLLM", lambda: software.vllm(answers())),
        ("media libraries", lambda: software.media(broken_packages(failure_of=software.import_failure))),
    ]


def _plugin(environment: Mapping[str, str], answers: Callable[[], Answers]) -> list[Named]:
    return [
        ("the entry point", lambda: plugin.entry_point(entry_points(group=plugin.GROUP))),
        ("VLLM_PLUGINS", lambda: plugin.allowed(environment)),
        ("the plug-in in vLLM", lambda: plugin.registered(answers())),
        ("the attention backend", lambda: plugin.backend(answers())),
        ("vLLM's configuration", lambda: plugin.engine(answers(), environment)),
    ]


def _memory(environment: Mapping[str, str], answers: Callable[[], Answers]) -> list[Named]:
    def now() -> memory.Memory:
        there = psutil.virtual_memory()
        return memory.Memory(there.total, there.available)

    def kv_space() -> Finding:
        if answers().known("backend").get("device", "cpu") != "cpu":
            raise Skipped  # the pool is in the device's own memory
        utilization = answers().known("engine").get("utilization", DEFAULT_UTILIZATION)
        node, total = memory.seen_by_vllm(answers(), now()), container.usable_memory()
        return memory.kv_space(environment, node, total, utilization)

    def shared() -> Finding:
        there = Path("/dev/shm")
        return memory.shared(shutil.disk_usage(there).free if there.is_dir() else None)

    def disk() -> Finding:
        folder = cache_dir()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        shown = str(folder).replace(str(Path.home()), "~", 1)
        return memory.disk(shown, shutil.disk_usage(there).free, os.access(there, os.W_OK))

    return [
        ("memory", lambda: memory.machine(now(), container.memory_limit())),
        ("the KV pool", kv_space),
        ("shared memory", shared),
        ("the cache folder", disk),
        ("pinned memory", lambda: memory.pinned(answers())),
    ]


def _cores(environment: Mapping[str, str], answers: Callable[[], Answers]) -> list[Named]:
    def count() -> Finding:
        physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
        return cores.count(physical, logical, os.sched_getaffinity(0), container.cpu_quota())

    return [
        ("cores", count),
        ("vLLM's threads", lambda: cores.threads(answers(), environment)),
        ("the pipeline", lambda: cores.pipeline(answers(), len(os.sched_getaffinity(0)))),
        ("compiled kernels", lambda: cores.kernels(answers())),
        ("LD_PRELOAD", lambda: cores.preloaded(answers(), platform.machine() == "x86_64")),
        ("processes and runner", lambda: cores.runner(environment)),
        ("huge pages", lambda: cores.huge_pages(HUGE_PAGES)),
    ]


def _is_known(model: str) -> bool:
    return model in KNOWN and not Path(model).is_dir()


def _to_load(model: str | None) -> str | None:
    """What vLLM is asked about: a folder or a name; nothing that would have to be fetched."""
    if model is None or not _is_known(model):
        return model
    return str(path(model)) if is_fetched(model) else None


def _model(model: str, answers: Callable[[], Answers]) -> Finding:
    if _to_load(model) is None:
        return Finding("model", Level.WARNING, f"{model} is not fetched yet", f"oasiskv model fetch {model}")
    return plugin.model(answers(), model)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings, those of a topic together, and what they come to."""
    table = Table("topic", "", "", box=None, pad_edge=False, header_style="bold", show_header=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        for index, finding in enumerate(group):
            text = Text(finding.text)
            if finding.fix:
                text.append(f"\n-> {finding.fix}", "dim" if finding.level is Level.OK else "bold")
            table.add_row(Text("" if index else topic, "bold"), Text(finding.level, STYLES[finding.level]), text)
    console.print(f"OasisKV {oasiskv.__version__} on {platform.system()} {platform.machine()}\n", highlight=False)
    console.print(table)
    number = Counter(finding.level for finding in findings)
    console.print(f"\nerrors: {number[Level.ERROR]}, warnings: {number[Level.WARNING]}", highlight=False)


def run(model: str | None, json_path: str | None, environment: Mapping[str, str] = os.environ) -> int:
    """Run every check and show what they find.

    Args:
        model: a model whose configuration is to be checked too.
        json_path: where to write the findings; ``-`` for standard output, instead of the table.
        environment: the variables to look at.

    Returns:
        The exit status: 1 if there is an error, else 0.
    """
    if json_path not in (None, "-") and not Path(json_path or "").absolute().parent.is_dir():
        raise UsageError(f"--json {json_path}: there is no such folder")
    with Console(stderr=True).status("") as status:
        findings = run_checks(checks(environment, model), lambda name: status.update(f"looking at {name}"))
    written = json.dumps(as_json(findings), indent=2)
    if json_path == "-":
        print(written)
    else:
        show(findings, Console())
        if json_path is not None:
            Path(json_path).write_text(written + "\n")
    return int(worst(findings) is Level.ERROR)
