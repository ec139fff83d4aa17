"""The demo's table, its check of the admission formula, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from oasiskv.bench.job import DENSE, OASIS, PLUS
from oasiskv.core.geometry import Geometry, blocks_for, running_at_once
from oasiskv.demo.outcome import Outcome
from oasiskv.demo.plan import TITLES, Memory

MIB = 1 << 20
LEAST_GAIN = 2
"""OasisKV must run at least this many times as many requests at once as stock vLLM in the same pool."""
COLUMNS = (
    "engine\n(KV pool)",
    "running\nat once",
    "device blocks\nper decoding\nrequest",
    "tokens/s\n(decoding)",
    "answers\nright",
    "fetched\na step",
)
NOTES = (
    "Running at once: most requests at any step. Device blocks: mean over decoding requests and steps, blocks really "
    "held. tokens/s: output tokens by the time from the first request to the last answer, all prompts included, "
    "loading not; (decoding): in the steps that compute no prompt. Fetched: bytes copied from the host pool, by steps "
    "in which some request decodes."
)


def table(outcomes: Sequence[Outcome], memory: Memory) -> Table:
    """One row for each engine; fits a terminal of 80 columns."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False, caption=NOTES, caption_justify="left", show_lines=True)
    for i, column in enumerate(COLUMNS):
        found.add_column(column, justify="right" if i else "left", no_wrap=True)
    for cells in rows(outcomes, memory):
        found.add_row(*cells)
    return found


def rows(outcomes: Sequence[Outcome], memory: Memory) -> list[tuple[str, ...]]:
    """The table's cells as text, in the order of ``COLUMNS``."""
    cells: list[tuple[str, ...]] = []
    for o in outcomes:
        pool = memory.pool_bytes + (memory.host_bytes if o.row == PLUS else 0)
        held = o.figures.blocks_mean * o.block_size * memory.token_bytes
        host = f" + {memory.host_bytes / MIB:,.0f}" if o.row == OASIS else ""
        cells.append(
            (
                f"{TITLES[o.row]}\n({pool / MIB:,.0f}{host} MiB)",
                str(o.figures.running),
                f"{o.figures.blocks_mean:.0f} x {o.block_size} tokens\n({held / MIB:.0f} MiB)",
                f"{o.figures.throughput:.1f}\n({o.figures.decode_throughput:.1f})",
                f"{o.right} of {len(o.answers)}",
                f"{o.figures.fetched_per_step / MIB:.1f} MiB" if o.row == OASIS else "-",
            )
        )
    return cells


def markdown(outcomes: Sequence[Outcome], memory: Memory) -> str:
    """The table as Markdown."""
    head = [column.replace("\n", " ") for column in COLUMNS]
    cells = [[cell.replace("\n", " ") for cell in row] for row in rows(outcomes, memory)]
    lines = [head, ["---"] + ["---:"] * (len(COLUMNS) - 1), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def formula(oasis: Outcome, geometry: Geometry, prompt_tokens: int) -> tuple[int, str]:
    """How many requests should run at once by the design's formula, and a line that says so beside what was seen."""
    full, bounded = blocks_for(prompt_tokens, geometry.block_size), geometry.footprint()
    expected = running_at_once(oasis.pool_blocks, full, bounded)
    return expected, (
        f"floor((P - F) / B) + 1 = floor(({oasis.pool_blocks} - {full}) / {bounded}) + 1 = {expected} requests at once "
        f"(in blocks; P: pool; F: a full prompt; B: a bounded request); seen: {oasis.figures.running}"
    )


def verdict(outcomes: Sequence[Outcome], expected: int) -> list[str]:
    """What went wrong, a sentence each; empty if the demo shows what it should."""
    by_row = {o.row: o for o in outcomes}
    stock, oasis = by_row[DENSE], by_row[OASIS]
    wrong = []
    if oasis.figures.running < LEAST_GAIN * stock.figures.running:
        wrong.append(
            f"OasisKV ran {oasis.figures.running} requests at once, stock vLLM {stock.figures.running} in the same "
            f"pool: expected are at least {LEAST_GAIN} times as many."
        )
    if oasis.right < stock.right:
        wrong.append(f"OasisKV answered {oasis.right} questions, stock vLLM {stock.right}: expected are no fewer.")
    if abs(oasis.figures.running - expected) > 1:
        wrong.append(
            f"OasisKV ran {oasis.figures.running} requests at once, by the formula it should be {expected}, within one."
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
