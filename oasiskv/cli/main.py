"""The console script: subcommands put together, and every known error turned into one line and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

import oasiskv
from oasiskv.bench.cells import BenchError
from oasiskv.bench.process import RunFailed
from oasiskv.bench.server import ServingError
from oasiskv.cli import model
from oasiskv.cli.options import UsageError
from oasiskv.core.settings import SettingsError
from oasiskv.installed import InstallError
from oasiskv.models import FetchError
from oasiskv.report.page import PageError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(model.app, name="model")

# vLLM's options are not known to this parser: everything after the subcommand is taken as it is.
_RAW = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
WRONG_INPUT, FAILED = 2, 1
OUR_ERRORS = (SettingsError, UsageError, InstallError, FetchError, BenchError, RunFailed, PageError, ServingError)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oasiskv {oasiskv.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve long contexts with only a budget of KV blocks on the device: a plug-in for unmodified vLLM."""


@app.command(context_settings=_RAW)
def serve(context: typer.Context) -> None:
    """Serve MODEL with vLLM's OpenAI-compatible server."""
    from oasiskv.cli.serve import run

    run(context.args)


@app.command(context_settings=_RAW)
def generate(context: typer.Context) -> None:
    """Answer a prompt offline."""
    from oasiskv.cli.generate import run

    run(context.args)


@app.command(context_settings=_RAW)
def bench(context: typer.Context) -> None:
    """Measure speed beside stock vLLM, in the same KV memory."""
    from oasiskv.cli.bench import run

    run(context.args)


@app.command(context_settings=_RAW)
def plan(context: typer.Context) -> None:
    """Say what fits, how fast it would be, and whether it pays."""
    from oasiskv.cli.plan import run

    run(context.args)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model whose configuration is to be checked too.")] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the findings there as JSON; - for stdout.")
    ] = None,
) -> None:
    """Look at what is installed and at this machine, and say what to do where something is wrong."""
    from oasiskv.cli.doctor import run

    raise typer.Exit(run(model, json_path))


@app.command("eval", context_settings=_RAW)
def evaluate(context: typer.Context) -> None:
    """Measure accuracy beside dense attention, on the same inputs."""
    from oasiskv.cli.eval import run

    run(context.args)


def known_error(error: BaseException) -> BaseException | None:
    """The error of ours that ``error`` is, came from, or (inside pydantic's) carries; None if there is none."""
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OUR_ERRORS):
            return current
        queue += [e for e in (current.__cause__, current.__context__, *_inside_pydantic(current)) if e is not None]
    return None


def _inside_pydantic(error: BaseException) -> Iterator[BaseException]:
    details = getattr(error, "errors", None)
    for detail in details() if callable(details) else ():
        inner = detail.get("ctx", {}).get("error") if isinstance(detail, dict) else None
        if isinstance(inner, BaseException):
            yield inner


def main() -> None:
    """Run the command line; a known error becomes one message on stderr and exit status 2 (1 if a fetch failed)."""
    try:
        app()
    except Exception as error:
        known = known_error(error)
        if known is None:
            raise
        print(f"oasiskv: error: {str(known).removeprefix('OasisKV: ')}", file=sys.stderr)
        sys.exit(FAILED if isinstance(known, FetchError | RunFailed | ServingError) else WRONG_INPUT)


if __name__ == "__main__":
    main()
