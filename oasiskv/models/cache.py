"""Where fetched things are kept, and how they get there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FetchError(RuntimeError):
    """Something could not be fetched or converted. The message names the way out."""


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/oasiskv``, or ``~/.cache/oasiskv``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "oasiskv"


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """A temporary folder on the file system of ``target``, gone afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_folder(built: Path, target: Path, *, replace: bool = False) -> None:
    """Move ``built`` to ``target`` by a rename. If another process was faster, its result is kept.

    With ``replace``, what lies at ``target`` (known to be unusable) makes way first.
    """
    if replace and target.exists():
        old = built.with_name(built.name + ".old")
        target.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        built.rename(target)
    except OSError:
        if not target.is_dir():
            raise
