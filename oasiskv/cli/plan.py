"""``oasiskv plan MODEL``: what fits, how fast it would be, and whether OasisKV pays, before anything is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from oasiskv.cli import plan_check, plan_report
from oasiskv.cli.options import UsageError, print_settings_help
from oasiskv.cli.plan_case import load_of, load_shape, measured_case, parse, parser
from oasiskv.core.plan import make_fleet, make_plan, reasons
from oasiskv.core.settings import Settings

USAGE = "oasiskv plan MODEL [options] [settings]"


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        shown = [f"{'/'.join(a.option_strings) or 'MODEL':22s} {a.help}" for a in parser()._actions]
        print_settings_help(USAGE, notes=("\n".join(shown),))
        return
    request = parse(arguments)
    args, console = request.args, Console(file=sys.stdout)
    if args.check is not None:
        results = plan_check.read_results(args.check)
        found = plan_check.compare(results, request)
        plan_check.show(console, found)
        write(args.json, {"kind": "plan check", "cells": [asdict(cell) for cell in found]})
        return
    shape = load_shape(args.model, args)
    case = measured_case(args, shape, load_of(args, shape), Settings.parse(request.settings))
    plan, rate = make_plan(case), args.requests_per_second
    fleet = make_fleet(case, rate) if rate else None
    plan_report.show(console, plan, fleet, rate)
    numbers = {"kind": "plan", **asdict(plan), "ratio": plan.ratio, "pays": plan.pays, "reasons": reasons(plan)}
    write(args.json, {**numbers, "fleet": asdict(fleet) if fleet else None})


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Write ``found`` as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2, default=Settings.model_dump) + "\n")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from None
