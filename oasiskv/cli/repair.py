"""Remove media libraries that were built for another torch than the installed one: ``python -m oasiskv.cli.repair``.

The CPU build of vLLM asks for torchvision, torchaudio and torchcodec without saying for which build of torch, so pip
may bring ones that do not import beside it ("operator torchvision::nms does not exist"), and then transformers, and
with it vLLM, does not start. Text models need none of them. One that imports is left alone, and so is one that fails
for another reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

MEDIA = ("torchvision", "torchaudio", "torchcodec")
MISMATCH = re.compile(
    r"operator torch(vision|audio|codec)\S* does not exist"
    r"|undefined symbol"
    r"|lib(c10|torch|cuda|cublas|nvrtc)\S*: cannot open shared object file"
)
"""What the output of a failed import says if the library was built for another torch: an operator that was not
registered, a symbol or a library of torch or CUDA that is not there. A missing FFmpeg, say, is not our business."""


def is_installed(package: str) -> bool:
    """Whether a distribution of this name is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def import_output(package: str) -> str | None:
    """What ``import package`` prints when it fails in a fresh Python; None if it works."""
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, errors="replace")
    return None if done.returncode == 0 else done.stderr


def uninstall(packages: list[str]) -> None:
    """Uninstall with pip, without asking."""
    command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--disable-pip-version-check", "--yes", *packages]
    subprocess.run(command, check=True)


def broken_packages(
    installed: Callable[[str], bool] = is_installed, failure_of: Callable[[str], str | None] = import_output
) -> list[str]:
    """The media libraries that are installed and do not fit the installed torch."""
    found = []
    for package in MEDIA:
        output = failure_of(package) if installed(package) else None
        if output is not None and MISMATCH.search(output):
            found.append(package)
    return found


def repair(
    installed: Callable[[str], bool] = is_installed,
    failure_of: Callable[[str], str | None] = import_output,
    remove: Callable[[list[str]], None] = uninstall,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Uninstall what :func:`broken_packages` finds, and say so.

    Returns:
        The packages removed.
    """
    broken = broken_packages(installed, failure_of)
    if broken:
        say(f"Removing {', '.join(broken)}: built for another torch than the installed one; text models need none.")
        remove(broken)
    return broken


if __name__ == "__main__":
    repair()
