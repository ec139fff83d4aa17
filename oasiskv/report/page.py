"""A self-contained HTML page: what was run, tables, plots. Opens without a network."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from oasiskv.report.provenance import Provenance
from oasiskv.report.table import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STYLE = """
:root { --ink: #1b2430; --faint: #5b6776; --line: #d9dfe6; --accent: #0b7a75; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { max-width: 75ch; } .notes, .made { color: var(--faint); font-size: .87rem; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; font-size: .87rem; } th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } code { font-size: .87rem; overflow-wrap: anywhere; }
.lead li { color: var(--ink); font-size: 1.02rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
"""
COLOURS = ("#8a94a1", "#0b7a75", "#c98b1b", "#5a4fcf", "#b0413e", "#3a86c8", "#7a9e3f")
"""Of the series of a plot: the first is always dense vLLM."""


class PageError(RuntimeError):
    """The page cannot be made."""


@dataclass
class Section:
    """A heading, sentences, tables and plots, in this order."""

    heading: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Figure] = field(default_factory=list)


def check_plotly() -> None:
    """Plots need plotly.

    Raises:
        PageError: it is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise PageError("the page needs plotly: pip install 'oasiskv[bench]', or leave the page out with --no-html")


def write_page(path: Path, title: str, made: Provenance, findings: Sequence[str], sections: Sequence[Section]) -> None:
    """Write the page; ``findings`` are the sentences at its top."""
    check_plotly()
    from plotly.offline import get_plotlyjs

    when = f"{html.escape(made.date)} · commit {html.escape(made.commit)}"
    body = [f"<h1>{html.escape(title)}</h1>", f'<p class="made">{when}</p>']
    body.append('<ul class="lead">' + "".join(f"<li>{html.escape(f)}</li>" for f in findings) + "</ul>")
    body += [part for section in sections for part in _section(section)]
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd><code>{html.escape(v)}</code></dd>" for k, v in made.lines())
    body.append(f"<h2>Made with</h2><dl>{rows}</dl>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script>"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>', encoding="utf-8"
    )


def _section(section: Section) -> list[str]:
    parts = [f"<h2>{html.escape(section.heading)}</h2>"]
    parts += [f"<p>{html.escape(sentence)}</p>" for sentence in section.sentences]
    for table in section.tables:
        parts.append(_table(table))
    for plot in section.plots:
        plot.update_layout(
            template="plotly_white", colorway=COLOURS, font={"family": "system-ui, sans-serif", "size": 13},
            margin={"l": 60, "r": 20, "t": 50, "b": 50}, height=380,
        )  # fmt: skip
        parts.append(plot.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False}))
    return parts


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    title = f"<p><b>{html.escape(table.title)}</b></p>" if table.title else ""
    notes = f'<p class="notes">{html.escape(table.notes)}</p>' if table.notes else ""
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}'
