"""Where a measurement's result goes: the terminal, JSON, Markdown, a page."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from oasiskv.report.page import PageError, Section, check_plotly, write_page
from oasiskv.report.provenance import Provenance
from oasiskv.report.table import Table


@dataclass
class Report:
    """A result as it is shown: ``findings`` are sentences, ``data`` is all of it, for JSON."""

    title: str
    tables: Sequence[Table]
    findings: Sequence[str]
    sections: Callable[[], Sequence[Section]]
    """Made only where a page is wanted: plots need plotly."""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """What was asked for on the command line."""

    html: Path | None
    json: Path | None
    markdown: bool

    @staticmethod
    def options(parser: argparse.ArgumentParser, page: str) -> None:
        """Add the options; ``page`` is the name of the page unless told otherwise."""
        parser.add_argument("--html", type=Path, default=Path(page), metavar="PATH", help=f"page with plots ({page})")
        parser.add_argument("--no-html", action="store_true", help="no page")
        parser.add_argument("--json", type=Path, metavar="PATH", help="all numbers")
        parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown too")

    @classmethod
    def of(cls, args: argparse.Namespace) -> Output:
        """From parsed options; checked before anything heavy starts.

        Raises:
            PageError: a page is wanted and cannot be made, or a file cannot be written.
        """
        html = None if args.no_html else args.html
        if html is not None:
            check_plotly()
        for path in (html, args.json):
            if path is not None:
                _check_writable(path)
        return cls(html, args.json, args.markdown)

    def deliver(self, report: Report, made: Provenance, console: Console, shown: bool = False) -> None:
        """Print (the tables only if they were not ``shown`` before) and write."""
        if not shown:
            for table in report.tables:
                console.print(table.rich())
        for sentence in report.findings:
            console.print(sentence, highlight=False)
        if self.markdown:
            for table in report.tables:
                print(f"\n{table.title}\n\n{table.markdown()}")
        self.save(report, made)
        if self.html:
            write_page(self.html, report.title, made, report.findings, report.sections())
            console.print(f"Page with plots: {self.html}", highlight=False)

    def save(self, report: Report, made: Provenance) -> None:
        """Write the JSON, if it is wanted: whole or, where this is interrupted, as it was before."""
        if self.json:
            self.json.parent.mkdir(parents=True, exist_ok=True)
            found = {"made": made.as_dict(), "findings": list(report.findings), **report.data}
            unfinished = self.json.with_name(self.json.name + ".part")
            unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            unfinished.replace(self.json)


def _check_writable(path: Path) -> None:
    """Before an hour of measuring, not after it."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise PageError(f"{path} cannot be written: give the path of a file in a folder that may be written to")
