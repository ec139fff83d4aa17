"""``oasiskv eval``: how accurate is sparse decoding, beside dense attention on the same inputs?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from oasiskv.cli.options import UsageError, split
from oasiskv.core.geometry import Geometry
from oasiskv.core.model_shape import read_shape
from oasiskv.core.settings import Settings
from oasiskv.installed import check_vllm
from oasiskv.models import resolve_model
from oasiskv.report.output import Output, Report
from oasiskv.report.provenance import provenance

KINDS = {
    "coverage": "softmax mass that each policy holds, by layer; what living with its choice costs",
    "fidelity": "perplexity, KL divergence and same tokens along real text, in the engine",
    "tasks": "retrieval and reasoning over long contexts, in the engine",
    "all": "the three above, one after the other",
    "lm-eval": "the tasks of the lm-eval package (RULER, GSM8K...) with this engine",
}
IN_ENGINE = ("fidelity", "tasks")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def _modules(kind: str) -> dict[str, Any]:
    """The measurements of a kind, by name."""
    from oasiskv.eval import coverage, fidelity, tasks_run

    known = {"coverage": coverage, "fidelity": fidelity, "tasks": tasks_run}
    return known if kind == "all" else {kind: known[kind]}


def parser(kind: str, quick: bool = False) -> argparse.ArgumentParser:
    """The command line of one kind, perhaps with small sizes as defaults. OasisKV's settings are taken out before."""
    found = _Parser(
        prog=f"oasiskv eval {kind}", description=KINDS[kind], allow_abbrev=False, conflict_handler="resolve",
        epilog="OasisKV's settings can be given too, but for the budget: --scorer box ...",
    )  # fmt: skip
    found.add_argument("--model", default="smollm2", help="a Hugging Face name, a folder, or a name of ours (smollm2)")
    found.add_argument("--quick", action="store_true", help="small sizes: minutes on two cores")
    Output.options(found, "eval.html")
    for module in _modules(kind).values():
        module.add_options(found)
        if quick:
            found.set_defaults(**module.QUICK)
    return found


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("Usage: oasiskv eval KIND [options]\n")
        print("\n".join(f"  {kind:10s} {about}" for kind, about in KINDS.items()))
        print("\nOptions of each: oasiskv eval KIND --help")
        return
    kind, rest = arguments[0], arguments[1:]
    if kind not in KINDS:
        raise UsageError(f"there is no evaluation {kind!r}; allowed are {', '.join(KINDS)}")
    if kind == "lm-eval":
        from oasiskv.eval.lm_eval import main

        raise SystemExit(main(rest))
    given, rest = split(rest)
    if "budget_tokens" in given:
        raise UsageError("--budget-tokens is not taken here: give --budgets 512,1024,2048")
    checked = Settings.parse(given)
    settings = {name: getattr(checked, name) for name in given}
    args = parser(kind, "--quick" in rest).parse_args(rest)
    output = Output.of(args)
    check(kind, args, settings)
    check_vllm()
    made = provenance(["oasiskv", "eval", *arguments])
    output.deliver(_together(args.model, _measure(kind, args, settings)), made, Console(), shown=True)


def check(kind: str, args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Refuse what cannot run, before anything heavy starts.

    Raises:
        UsageError: the model's context is too short, or something is not known.
        SettingsError: a budget leaves no hot slot.
    """
    _check_sizes(args)
    for budget in args.budgets:
        Geometry.of(Settings.parse({**settings, "budget_tokens": budget}), BLOCK)
    modules = _modules(kind)
    try:
        if "tasks" in modules:
            modules["tasks"].check(args)
        if "coverage" in modules:
            modules["coverage"].chosen_policies(args, settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    context = model_context(args.model)
    need = _longest(modules, args)
    if context is not None and need > context:
        raise UsageError(
            f"the contexts asked for take {need:,} tokens, {args.model} has {context:,}: use shorter ones "
            "(--tokens, --contexts, --length), or another model"
        )


def _check_sizes(args: argparse.Namespace) -> None:
    """What is counted must be there."""
    least = {"forced": 2, "steps": 2}
    for name in ("tokens", "steps", "texts", "forced", "length", "documents", "questions"):
        value = getattr(args, name, None)
        if value is not None and value < least.get(name, 1):
            raise UsageError(f"--{name} {value} is not allowed: {least.get(name, 1)} or more")
    for name in ("scorers", "tasks", "caps"):
        value = getattr(args, name, None)
        if value is not None and not value:
            raise UsageError(f"--{name} names nothing")


def _longest(modules: dict[str, Any], args: argparse.Namespace) -> int:
    lengths = [module.longest(args) for name, module in modules.items() if name in IN_ENGINE]
    return max([*lengths, args.tokens + args.steps] if "coverage" in modules else lengths)


def model_context(name: str) -> int | None:
    """Tokens of a model's context; None if its configuration is not on this machine."""
    config = Path(resolve_model(name)) / "config.json"
    return read_shape(name, json.loads(config.read_text())).max_context if config.is_file() else None


def _measure(kind: str, args: argparse.Namespace, settings: dict[str, Any]) -> list[Report]:
    modules, console, progress = _modules(kind), Console(), Console(stderr=True)
    reports = []

    def keep(report: Report) -> None:
        reports.append(report)
        for table in report.tables:
            console.print(table.rich())

    if "coverage" in modules:
        keep(modules["coverage"].measure(args, settings, progress))
    engines = {name: module for name, module in modules.items() if name in IN_ENGINE}
    if engines:
        from oasiskv.eval.engine import EvalEngine

        longest = max(module.longest(args) for module in engines.values())
        with progress.status("starting the engine"):
            engine = EvalEngine(resolve_model(args.model), longest, POOL_CONTEXTS, settings)
        for module in engines.values():
            keep(module.measure(args, engine, progress))
        engine.close()
    return reports


def _together(model: str, reports: list[Report]) -> Report:
    if len(reports) == 1:
        return reports[0]
    return Report(
        title=f"Accuracy beside dense attention: {model}",
        tables=[table for report in reports for table in report.tables],
        findings=[sentence for report in reports for sentence in report.findings],
        sections=lambda: [section for report in reports for section in report.sections()],
        data={report.data["kind"]: report.data for report in reports},
    )


BLOCK = 32
POOL_CONTEXTS = 8
"""Longest contexts that the engine's KV pool holds."""
