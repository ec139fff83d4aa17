"""What the command lines of all evaluations share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

DEFAULT_BUDGETS = (512, 1024, 2048)


def names(text: str | list[str]) -> list[str]:
    """``a,b`` to a list."""
    return text if isinstance(text, list) else [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(text: str) -> list[int]:
    """``512,1024`` to a list of numbers above 0."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: whole numbers above 0, with commas between")
    return [int(part) for part in parts]


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """``--budgets``."""
    shown = ",".join(map(str, DEFAULT_BUDGETS))
    parser.add_argument(
        "--budgets", type=whole_numbers, default=list(DEFAULT_BUDGETS), help=f"budgets to compare ({shown})"
    )


@contextmanager
def bar(what: str, total: int, console: Console) -> Iterator[Callable[[], None]]:
    """A progress bar; call what comes out of it once for each of ``total`` things done."""
    columns = (TextColumn(f"[bold]{what}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
