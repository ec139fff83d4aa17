"""One table, shown in the terminal, in Markdown, and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row. ``notes`` say what the columns mean."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: str = ""

    def rich(self) -> RichTable:
        """For the terminal."""
        found = RichTable(
            title=self.title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False,
            caption=self.notes or None, caption_justify="left",
        )  # fmt: skip
        for i, column in enumerate(self.columns):
            found.add_column(column, justify="right" if i else "left", overflow="fold", no_wrap=not i)
        for row in self.rows:
            found.add_row(*row)
        return found

    def markdown(self) -> str:
        """For the docs."""
        lines: list[Sequence[str]] = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace(chr(10), ' ') for cell in line)} |" for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"title": self.title, "columns": list(self.columns), "rows": [list(row) for row in self.rows]}
