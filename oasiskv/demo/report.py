"""The demo's table, its check of the admission formula, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from oasiskv.core.geometry import Geometry, blocks_for, running_at_once
from oasiskv.demo.plan import OASIS, STOCK, TITLES, Memory
from oasiskv.demo.probe import Outcome

MIB = 1 << 20
LEAST_GAIN = 2
"""OasisKV must run at least this many times as many requests at once as stock vLLM in the same pool."""
COLUMNS = (
    "",
    "KV pool",
    "requests running at once",
    "device blocks per decoding request",
    "tokens/s, whole run",
    "tokens/s, decoding only",
    "answers right",
    "fetched per step",
)
NOTES = (
    "Blocks: mean over decoding requests and steps, real device blocks only. Whole run: output tokens by the time from "
    "the first request to the last answer, all prompts included, loading not. Decoding only: the steps in which no "
    "prompt was computed. Fetched: bytes copied from the host pool, by the steps in which some request decoded."
)


def table(outcomes: Sequence[Outcome], memory: Memory, title: str, oasis_note: str = "") -> Table:
    """One row for each engine."""
    found = Table(title=title, caption=NOTES, caption_justify="left", title_justify="left")
    for i, column in enumerate(COLUMNS):
        found.add_column(column, justify="right" if i else "left", no_wrap=False)
    for cells in rows(outcomes, memory, oasis_note):
        found.add_row(*cells)
    return found


def rows(outcomes: Sequence[Outcome], memory: Memory, oasis_note: str = "") -> list[tuple[str, ...]]:
    """The table's cells as text, in the order of ``COLUMNS``."""
    cells: list[tuple[str, ...]] = []
    for o in outcomes:
        is_oasis = o.row == OASIS
        pool = memory.pool_bytes if o.row in (STOCK, OASIS) else memory.pool_bytes + memory.host_bytes
        tokens = o.blocks_mean * o.block_size
        cells.append(
            (
                TITLES[o.row] + (f" ({oasis_note})" if is_oasis and oasis_note else ""),
                f"{pool / MIB:.0f} MiB" + (f" + {memory.host_bytes / MIB:.0f} on the host" if is_oasis else ""),
                str(o.running_max),
                f"{o.blocks_mean:.0f} x {o.block_size} tokens = {tokens * memory.token_bytes / MIB:.0f} MiB",
                f"{o.tokens_per_second:.1f}",
                f"{o.decode_rate:.1f}",
                f"{o.right} of {len(o.answers)}",
                f"{o.fetched_per_step / MIB:.1f} MiB" if is_oasis else "-",
            )
        )
    return cells


def markdown(outcomes: Sequence[Outcome], memory: Memory, oasis_note: str = "") -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ("---", *("---:",) * (len(COLUMNS) - 1)), *rows(outcomes, memory, oasis_note)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def formula(oasis: Outcome, geometry: Geometry, prompt_tokens: int) -> tuple[int, str]:
    """How many requests should run at once by the design's formula, and a line that says so beside what was seen."""
    full, bounded = blocks_for(prompt_tokens, geometry.block_size), geometry.footprint()
    expected = running_at_once(oasis.pool_blocks, full, bounded)
    return expected, (
        f"floor((P - F) / B) + 1 = floor(({oasis.pool_blocks} - {full}) / {bounded}) + 1 = {expected} requests at once "
        f"(in blocks; P: pool less summaries; F: a full prompt; B: a bounded request); seen: {oasis.running_max}"
    )


def verdict(outcomes: Sequence[Outcome], expected: int) -> list[str]:
    """What went wrong, a sentence each; empty if the demo shows what it should."""
    by_row = {o.row: o for o in outcomes}
    stock, oasis = by_row[STOCK], by_row[OASIS]
    wrong = []
    if oasis.running_max < LEAST_GAIN * stock.running_max:
        wrong.append(
            f"OasisKV ran {oasis.running_max} requests at once, stock vLLM {stock.running_max} in the same pool: "
            f"expected are at least {LEAST_GAIN} times as many."
        )
    if oasis.right < stock.right:
        wrong.append(f"OasisKV answered {oasis.right} questions, stock vLLM {stock.right}: expected are no fewer.")
    if abs(oasis.running_max - expected) > 1:
        wrong.append(
            f"OasisKV ran {oasis.running_max} requests at once, by the formula it should be {expected}, within one."
        )
    return wrong


def as_json(
    outcomes: Sequence[Outcome], memory: Memory, settings: dict[str, Any], expected: int, wrong: Sequence[str]
) -> dict[str, Any]:
    """All numbers."""
    return {
        "memory": memory.__dict__,
        "settings": settings,
        "rows": [o.as_dict() for o in outcomes],
        "formula": expected,
        "failures": list(wrong),
    }
