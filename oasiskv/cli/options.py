"""A command line cut in two: our settings, and what is vLLM's.

Our options are made from :class:`Settings`: ``budget_tokens`` is ``--budget-tokens``. Everything else is left, in
order, for vLLM's own parser, which knows what to say of an option that nobody has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oasiskv.core.settings import Settings

CONNECTOR_FLAG = "--kv-transfer-config"


class UsageError(ValueError):
    """The command line is wrong. The message gives the fix."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong as every command does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take our settings out of a command line.

    Returns:
        The settings given, as text for :meth:`Settings.parse`, and all other arguments in their order.

    Raises:
        UsageError: one of our options has no value.
    """
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in Settings.model_fields:
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))  # vLLM takes either spelling too
        parser.add_argument(*flags, dest=name)
    ours, rest = parser.parse_known_args(list(arguments))
    return vars(ours), rest


def has_flag(arguments: Iterable[str], flag: str) -> bool:
    """Whether ``flag`` is given in a spelling that vLLM takes: ``--a-b``, ``--a_b``, ``--a-b=x``, ``--a-b.key``."""
    return any(a.split("=")[0].split(".")[0].replace("_", "-") == flag for a in arguments if a.startswith("--"))


def split_model(rest: list[str], command: str) -> tuple[str, list[str]]:
    """The model and vLLM's other arguments, out of what :func:`split` left.

    Raises:
        UsageError: the model does not come first, or the user chose a connector himself.
    """
    if has_flag(rest, CONNECTOR_FLAG):
        raise UsageError(
            f"{CONNECTOR_FLAG} is set by OasisKV and cannot be given: another connector beside it is not supported. "
            f"Give OasisKV's settings as options (--budget-tokens 2048), or run vLLM's own server without OasisKV"
        )
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"the model must come first: oasiskv {command} MODEL [options]")
    return rest[0], rest[1:]


def did_you_mean(arguments: Iterable[str]) -> str | None:
    """A hint for a command line that vLLM's parser refused: the setting that an option of it resembles, if any."""
    flags = [f"--{name.replace('_', '-')}" for name in Settings.model_fields]
    for argument in arguments:
        close = get_close_matches(argument.split("=")[0].replace("_", "-"), flags, n=1, cutoff=0.85)
        if argument.startswith("--") and close:
            return f"did you mean {close[0]}?"
    return None


def print_settings_help(usage: str, *, notes: Sequence[str] = (), console: Console | None = None) -> None:
    """Print usage, the table of settings with their defaults, and ``notes``."""
    console = console or Console(file=sys.stdout)
    console.print(f"Usage: [bold]{escape(usage)}[/]\n")
    table = Table("setting", "default", "meaning", box=None, pad_edge=False, header_style="bold")
    for name, field in Settings.model_fields.items():
        table.add_row(f"--{name.replace('_', '-')}", str(field.default), escape(_meaning(name, field)))
    console.print(table)
    for note in notes:
        console.print(f"\n{escape(note)}")


def _meaning(name: str, field: Any) -> str:
    schema = Settings.model_json_schema()["properties"][name]
    choices = schema.get("enum")
    described = field.description or ""
    return f"{described} One of {', '.join(choices)}." if choices else described
