"""A plan as tables and sentences for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oasiskv.core.devices import GB, GIB, TERA
from oasiskv.core.plan import Fleet, Plan, Side, reasons
from oasiskv.core.step_time import ARITHMETIC

MB, KIB = 10**6, 1 << 10
POOLED = "stock, host\nmemory added"


def show(console: Console, plan: Plan, fleet: Fleet | None, requests_per_second: float | None) -> None:
    """Print the plan, and the fleet if one was asked for."""
    for line in premises(plan):
        console.print(escape(line), highlight=False)
    console.print(sides_table(plan), highlight=False)
    if any(p.bound_by == ARITHMETIC for side in (plan.dense, plan.oasis) for p in side.step.phases.values()):
        console.print("* bound by arithmetic, not by memory", highlight=False)
    for sentence in reasons(plan):
        console.print(escape(sentence), highlight=False)
    if fleet is not None:
        console.print(fleet_table(plan, fleet, requests_per_second or 0.0), highlight=False)


def premises(plan: Plan) -> list[str]:
    """What the plan is made from."""
    case = plan.case
    shape, device, load = case.shape, case.device, case.load
    active = f" ({shape.active_params / GB:,.2f} B a token)" if shape.experts else ""
    sliding = f" + {shape.sliding_layers} sliding ({shape.sliding_window:,} tokens)" if shape.sliding_layers else ""
    drafts = f", {load.draft_tokens} drafts, {load.acceptance:g} accepted" if load.draft_tokens else ""
    kv_rate = f", KV {device.kv_bandwidth / GB:,.3g}" if device.kv_bandwidth else ""
    scores = f", summaries {device.summary_bandwidth / GB:,.3g}" if device.summary_bandwidth else ""
    return [
        f"model   {shape.name}: {shape.params / GB:,.3f} B parameters{active}, {shape.held_bytes / GIB:,.2f} GiB; "
        f"{shape.layers} layers{sliding} x {shape.kv_heads} KV heads x {shape.head_dim}; "
        f"KV {shape.kv_bytes_per_token / KIB:,.4g} KiB a token",
        f"device  {device.name}: {device.memory_bytes / GIB:,.1f} GiB, {device.memory_bandwidth / GB:,.4g} GB/s"
        f"{kv_rate}{scores}, {device.flops / TERA:,.3g} TFLOP/s, link {device.link_bandwidth / GB:,.3g} GB/s, of which "
        f"{device.attained:g} is reached; {1e3 * device.overhead:g} ms a step ({device.source})",
        f"load    {load.prompt_tokens:,} + {load.output_tokens:,} tokens, "
        f"{load.concurrency or 'as many as fit'} at once{drafts}; KV pool {case.pool_bytes / GIB:,.2f} GiB; "
        f"budget {case.settings.budget_tokens:,}, scorer {case.settings.scorer}, cap {case.settings.fetch_cap}",
    ]


def sides_table(plan: Plan) -> Table:
    """Stock vLLM beside OasisKV."""
    sides = [plan.dense, plan.oasis, *([plan.pooled] if plan.pooled else [])]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("stock vLLM", f"OasisKV\n({plan.oasis.holding.state})", POOLED)[: len(sides)]:
        table.add_column(title, justify="right")
    for title, cell in _rows(plan):
        table.add_row(title, *(cell(side) for side in sides))
    return table


def _rows(plan: Plan) -> list[tuple[str, Callable[[Side], str]]]:
    here = "prefilled here" if plan.case.load.prefill_here else "prefilled elsewhere"
    rows: list[tuple[str, Callable[[Side], str]]] = [
        ("pool, blocks x tokens", lambda s: f"{s.holding.pool_blocks:,} x {s.holding.block_size}"),
        ("  summaries take, blocks", lambda s: f"{s.holding.summary_blocks:,}"),
        (
            "a decoding request holds",
            lambda s: f"{s.holding.held_blocks:,} blocks\n{s.holding.held_bytes / GIB:.3f} GiB",
        ),
        ("fit, prompts prefilled here", lambda s: f"{s.holding.fits:,}"),
        ("fit, prefilled elsewhere", lambda s: f"{s.holding.fits_elsewhere:,}"),
        (f"running at once ({here})", lambda s: f"{s.running:,}"),
        ("fit in the host pool", lambda s: "-" if s.holding.fits_host is None else f"{s.holding.fits_host:,}"),
        ("host memory in use", lambda s: f"{s.host_bytes / GIB:,.2f} GiB"),
    ]
    for name in plan.oasis.step.phases:
        rows.append((f"  {name}, ms", lambda s, name=name: _phase(s, name)))  # type: ignore[misc]
    return [
        *rows,
        ("step, ms", lambda s: f"{1e3 * s.step.seconds:,.2f}"),
        ("pages in per step, KV head", lambda s: f"{s.step.link.pages}" if s.step.link else "-"),
        ("  over the link, MB", lambda s: f"{s.step.link.wanted_bytes / MB:,.1f}" if s.step.link else "-"),
        ("  carried in a step, MB", lambda s: f"{s.step.link.carried_bytes / MB:,.1f}" if s.step.link else "-"),
        ("  cap that is carried", lambda s: f"{s.step.link.carried_cap:.3g}" if s.step.link else "-"),
        ("tokens/s, decoding", lambda s: f"{s.tokens_per_second:,.1f}"),
        ("tokens/s, prefill included", lambda s: f"{s.with_prefill:,.1f}"),
    ]


def _phase(side: Side, name: str) -> str:
    phase = side.step.phases.get(name)
    if phase is None:
        return "-"
    return f"{1e3 * phase.seconds:,.2f}" + (" *" if phase.bound_by == ARITHMETIC else "")


def fleet_table(plan: Plan, fleet: Fleet, requests_per_second: float) -> Table:
    """Nodes, with prompts prefilled on nodes of their own."""
    each = f"{plan.prefill_seconds:.3g} s a prompt"
    table = Table(f"nodes for {requests_per_second:g} requests/s", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stock vLLM", justify="right")
    table.add_column("OasisKV", justify="right")
    table.add_row("decode", f"{fleet.decode_dense:,}", f"{fleet.decode_oasis:,}")
    table.add_row(f"prefill ({each})", f"{fleet.prefill:,}", f"{fleet.prefill:,}")
    return table
