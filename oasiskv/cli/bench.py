"""``oasiskv bench``: stock vLLM and OasisKV side by side, in turn, in the same KV memory."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from oasiskv.bench import report
from oasiskv.bench.cells import GIB, Cell, Model, dtype_of, make_cell, pool_tokens
from oasiskv.bench.engine_pool import EnginePool
from oasiskv.bench.job import LIMIT, PLUS
from oasiskv.bench.rounds import CellResult, run_cell
from oasiskv.bench.runner import Runner, load_model, text_source
from oasiskv.bench.workloads import QUICK, WORKLOADS, Workload
from oasiskv.cli.options import CONNECTOR_FLAG, Parser, UsageError, has_flag, print_settings_help, split
from oasiskv.core.settings import Settings
from oasiskv.eval.options import whole_numbers
from oasiskv.installed import check_vllm
from oasiskv.report.output import Output
from oasiskv.report.provenance import provenance

USAGE = f"oasiskv bench [{'|'.join(WORKLOADS)} ...] [options] [settings] [any engine option of vLLM]"
TAKEN = (
    CONNECTOR_FLAG, "--kv-cache-memory-bytes", "--max-model-len", "--block-size", "--num-gpu-blocks-override",
    "--kv-cache-dtype", "--disable-log-stats", "--served-model-name",
)  # fmt: skip
"""Options of vLLM that would make the engines unequal, or blind."""
DEFAULT = ("long-context", "reasoning")
TARGETS = "targets"
"""In the place of a workload: a command of its own."""


@dataclass(frozen=True)
class Request:
    """What is asked for, checked, before anything heavy starts."""

    model: Model
    cells: tuple[Cell, ...]
    rounds: int
    side_rounds: int
    side_rows: tuple[str, ...]
    random_text: bool
    output: Output


def parser() -> argparse.ArgumentParser:
    """Our own options; settings and vLLM's options are taken out or left by others."""
    found = Parser(add_help=False, allow_abbrev=False)
    found.add_argument("--model", default="smollm2", help="a folder, or a name of `oasiskv model list` (smollm2)")
    found.add_argument("--prompt", type=whole_numbers, help="tokens of a prompt; several, with commas, make a sweep")
    found.add_argument("--output", type=whole_numbers, help="tokens of an answer; several make a sweep")
    found.add_argument("--turns", type=int, help="turns of a conversation (multi-turn)")
    found.add_argument("--requests", type=int, help="requests of each run (8)")
    found.add_argument("--concurrency", type=whole_numbers, help="most requests in flight (all); several make a sweep")
    found.add_argument(
        "--budgets", type=whole_numbers, help="budgets to compare; like --budget-tokens, several make a sweep"
    )
    found.add_argument("--pool-requests", type=float, default=3.0, help="the KV pool holds so many whole requests (3)")
    found.add_argument("--pool-gib", type=float, help="the KV pool in GiB, instead")
    found.add_argument("--rounds", type=int, help="dense and OasisKV in turn, so many times (3)")
    found.add_argument("--side-rounds", type=int, default=1, help="rounds in which the further rows run too (1)")
    found.add_argument("--rows", default=",".join((PLUS, LIMIT)), help="further rows: dense_plus_host,limit, or none")
    found.add_argument("--quick", action="store_true", help="small sizes and budgets, two rounds, nothing compiled")
    found.add_argument("--rate", type=float, default=0.5, help="requests per second (serve; 0.5)")
    found.add_argument("--stretch", action="store_true", help="contexts beyond the model's own (decode only)")
    found.add_argument("--random-text", action="store_true", help="random tokens instead of essays")
    Output.options(found, "bench.html")
    return found


def parse(arguments: Sequence[str]) -> Request:
    """Check the command line.

    Raises:
        SettingsError, UsageError, BenchError, FetchError, PageError: something is wrong with it.
    """
    names = list(itertools.takewhile(lambda a: not a.startswith("-"), arguments))
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"there is no workload {unknown[0]!r}; allowed are {', '.join(WORKLOADS)}")
    given, rest = split(arguments[len(names) :])
    checked = Settings.parse(given)
    settings = {name: getattr(checked, name) for name in given}
    args, options = parser().parse_known_args(rest)
    if args.rounds is None:
        args.rounds = 2 if args.quick else 3
    options += ["--enforce-eager"] if args.quick and not has_flag(options, "--enforce-eager") else []
    side_rows = _check(args, options)
    if "host_gib" in settings:
        raise UsageError("--host-gib is set by the benchmark: the KV of all requests at once")
    if args.budgets and "budget_tokens" in settings:
        raise UsageError("--budgets and --budget-tokens are the same: give one of them")
    model = load_model(args.model, dtype_of(options))
    known = QUICK if args.quick else WORKLOADS
    cells = [cell for name in names or DEFAULT for cell in _cells(known[name], model, args, settings, tuple(options))]
    for cell in cells:
        cell.check(model)
    return Request(
        model=model,
        cells=tuple(cells),
        rounds=args.rounds,
        side_rounds=args.side_rounds,
        side_rows=side_rows,
        random_text=args.random_text,
        output=Output.of(args),
    )


def _check(args: argparse.Namespace, options: Sequence[str]) -> tuple[str, ...]:
    """What argparse does not check. Returns the further rows."""
    for flag in TAKEN:
        if has_flag(options, flag):
            raise UsageError(f"{flag} is set by the benchmark, for both engines: leave it out")
    late = [option for option in options if option in WORKLOADS]
    if late:
        raise UsageError(f"{late[0]} comes too late: workloads stand before all options")
    for name in ("rounds", "requests", "turns"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} is not allowed: 1 or more")
    for name in ("pool_requests", "pool_gib", "rate"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed: a number above 0")
    rows = () if args.rows == "none" else tuple(args.rows.split(","))
    wrong = [row for row in rows if row not in (PLUS, LIMIT)]
    if wrong:
        raise UsageError(f"--rows {wrong[0]} is not allowed: {PLUS}, {LIMIT}, both with a comma between, or none")
    return rows


def _cells(
    workload: Workload, model: Model, args: argparse.Namespace, settings: dict[str, Any], options: tuple[str, ...]
) -> list[Cell]:
    """The sweep of one workload, all in the same KV pool."""
    if args.turns is not None and workload.turns > 1:
        workload = replace(workload, turns=args.turns)
    lengths = itertools.product(args.prompt or [workload.prompt], args.output or [workload.output])
    sized = [replace(workload, prompt=prompt, output=output) for prompt, output in lengths]
    pool: float = max(pool_tokens(args.pool_requests, w) for w in sized) * model.token_bytes
    if args.pool_gib:
        pool = args.pool_gib * GIB
    usual = args.requests or workload.requests
    budgets = args.budgets or [settings.get("budget_tokens", workload.budget)]
    cells = []
    for w, at_once, budget in itertools.product(sized, args.concurrency or [usual], budgets):
        chosen = settings if budget is None else {**settings, "budget_tokens": budget}
        requests, stretch = max(usual, at_once), args.stretch and w.fill
        cells.append(
            make_cell(model, w, requests, at_once, chosen, pool, options=options, stretch=stretch, rate=args.rate)
        )
    return cells


def run(arguments: Sequence[str]) -> None:
    """Run the command: progress on the way, then tables, sentences and the page."""
    if list(arguments[:1]) == [TARGETS]:
        from oasiskv.cli.bench_targets import run as run_targets

        run_targets(arguments[1:])
        return
    if "--help" in arguments or "-h" in arguments:
        options = [f"{'/'.join(a.option_strings):18s} {a.help}" for a in parser()._actions]
        workloads = (f"{w.name}: {w.about}" for w in WORKLOADS.values())
        targets = f"oasiskv bench {TARGETS} --help: the speed targets, and whether they are met"
        print_settings_help(USAGE, notes=("\n".join(options), *workloads, targets))
        return
    check_vllm()
    request = parse(arguments)
    made = provenance(["oasiskv", "bench", *arguments])
    console, progress = Console(), Console(stderr=True)
    results: list[CellResult] = []
    for number, cell in enumerate(request.cells, 1):
        progress.print(f"[bold]{number} of {len(request.cells)}: {cell.title}", highlight=False)
        source = text_source(request.model, cell, random_text=request.random_text)
        rows = [row for row in request.side_rows if row != LIMIT or cell.has_limit(request.model)]
        try:
            with EnginePool(progress) as engines:
                runner = Runner(request.model, source, engines, progress)
                results.append(run_cell(cell, runner, request.rounds, request.side_rounds, rows))
        except BaseException:
            if results:  # hours of measuring are not lost with the last cell
                request.output.deliver(report.make(request.model.name, results), made, console, shown=True)
            raise
        console.print(report.table(results[-1]).rich())
    request.output.deliver(report.make(request.model.name, results), made, console, shown=True)
