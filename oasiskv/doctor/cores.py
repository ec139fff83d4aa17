"""Cores: how many, what vLLM binds to them, whether one is left for the pipeline; kernels and preloaded libraries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path

from oasiskv.core.kernels import ISAS
from oasiskv.doctor.finding import Finding, Level
from oasiskv.doctor.fresh import Answers, ProbeError

TOPIC = "cores"
ENOUGH = 16
"""From here on one core less for the forward pass costs less than what the pipeline takes off it: 2 to 14 % of a step,
in kernels that use all cores (docs/results.md)."""
PRELOADED = {"libtcmalloc": "memory allocation", "libiomp": "speed, above all with speculative decoding"}
"""What vLLM's worker on an x86 CPU looks for in LD_PRELOAD, warns about and says what for (``cpu_worker.py``)."""


def count(physical: int | None, logical: int | None, allowed: Collection[int], quota: float | None) -> Finding:
    """How many cores this process may use.

    Args:
        physical: cores of the machine.
        logical: threads that they offer.
        allowed: ids of those that this process may run on (its affinity).
        quota: how many of them a container may keep busy, if it is limited.
    """
    text = f"{physical or 'unknown'} physical, {logical or 'unknown'} logical; allowed here: {spans(allowed)}"
    if quota is not None and quota < len(allowed):
        text += f", but the container may keep only {quota:.1f} busy: more threads only wait for each other"
        some = spans(sorted(allowed)[: max(1, int(quota))])
        fix = f"docker run --cpuset-cpus {some}, or VLLM_CPU_OMP_THREADS_BIND={some}"
        return Finding(TOPIC, Level.WARNING, text, fix)
    return Finding(TOPIC, Level.OK, text)


def spans(ids: Iterable[int]) -> str:
    """Core ids in vLLM's own notation: ``0-3,8``."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def threads(answers: Answers, environment: Mapping[str, str]) -> Finding:
    """Which threads a worker of vLLM will have, and what in the environment says so."""
    facts = answers["threads"]
    number = environment.get("OMP_NUM_THREADS")
    bind = environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if facts["cores"]:
        text = f"vLLM binds {facts['threads']} threads to cores {spans(facts['cores'])}"
        text += f" (VLLM_CPU_OMP_THREADS_BIND={bind})"
        text += f", leaves {spans(facts['reserved'])} alone" if facts["reserved"] else ""
        text += f"; OMP_NUM_THREADS={number} has no effect on it" if number else ""
        return Finding(TOPIC, Level.OK, text)
    given = f"OMP_NUM_THREADS={number}" if number else "OMP_NUM_THREADS is not set"
    return Finding(TOPIC, Level.OK, f"vLLM binds no threads to cores and starts {facts['threads']} ({given})")


def pipeline(answers: Answers, allowed: int) -> Finding:
    """Where ``pipeline=auto`` will score and plan: beside the forward pass, or in it. ``allowed``: usable cores."""
    facts = answers["threads"]
    if facts["free_core"]:
        return Finding(TOPIC, Level.OK, "a core is left for the pipeline: pipeline=auto is async, in the background")
    text = "no core is left for the pipeline: pipeline=auto is inline, in the forward pass (same results)"
    if allowed < ENOUGH:
        return Finding(TOPIC, Level.OK, f"{text}; right for so few cores")
    fix = f"VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS={allowed - 1}; measure which is faster here"
    return Finding(TOPIC, Level.WARNING, text, fix)


def kernels(answers: Answers) -> Finding:
    """Whether our compiled kernels run, and what numba has for the parallel ones of vLLM's ngram drafter."""
    try:
        facts = answers["kernels"]
    except ProbeError as error:
        fix = "pip install --force-reinstall oasiskv numba"
        return Finding(TOPIC, Level.ERROR, f"compiled kernels do not run: {error}", fix)
    layers = ", ".join(facts["layers"]) or "none"
    numba = f"numba {facts['numba']}; threading layers: {layers}, set: {facts['chosen']}"
    if facts["isa"] < 0:
        text = f"there are no compiled kernels, torch scores and plans instead, many times slower ({numba})"
        return Finding(TOPIC, Level.WARNING, text, "install g++ and OasisKV again; leave OASISKV_KERNELS unset")
    text = f"compiled kernels run, for {ISAS[facts['isa']]} ({numba})"
    if not facts["layers"]:
        return Finding(TOPIC, Level.WARNING, text, "pip install --force-reinstall numba; ngram drafts need a layer")
    return Finding(TOPIC, Level.OK, text)


def preloaded(answers: Answers, x86: bool) -> Finding:
    """What vLLM's worker recommends to preload on a CPU and does not find. Not needed, so never more than a hint."""
    facts = answers["threads"]
    wanted = {name: why for name, why in PRELOADED.items() if x86 or name != "libiomp"}
    missing = [f"{name} ({why})" for name, why in wanted.items() if name not in facts["preloaded"]]
    if not missing:
        return Finding(TOPIC, Level.OK, f"LD_PRELOAD has {', '.join(wanted)}")
    text = f"LD_PRELOAD has no {', no '.join(missing)}; works without"
    return Finding(TOPIC, Level.OK, text, 'as vLLM recommends: section "set LD_PRELOAD" of its installation on CPUs')


def runner(environment: Mapping[str, str]) -> Finding:
    """Variables that change which of vLLM's processes and runners work."""
    notes = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0 runs an offline engine in the caller's process, without binding threads",
        "VLLM_USE_V2_MODEL_RUNNER": "1 asks for a runner that does not work on CPUs, 0 is what they use anyway",
    }
    given = [f"{name}={environment[name]} ({note})" for name, note in notes.items() if name in environment]
    text = "; ".join(given) or f"not set: {', '.join(notes)}"
    if environment.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        return Finding(TOPIC, Level.WARNING, text, "unset VLLM_USE_V2_MODEL_RUNNER")
    return Finding(TOPIC, Level.OK, text)


def huge_pages(modes: Path) -> Finding:
    """How Linux uses transparent huge pages; ``modes`` is its file, in which the mode in force stands in brackets."""
    mode = modes.read_text().partition("[")[2].partition("]")[0] if modes.is_file() else ""
    return Finding(TOPIC, Level.OK, f"transparent huge pages: {mode or 'not known'}")
