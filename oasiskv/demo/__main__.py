"""``python -m oasiskv.demo``: real SmolLM2, eight long documents with a question each, three engines, one table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from oasiskv.bench.cells import OASIS_BLOCK, Model
from oasiskv.bench.job import OASIS
from oasiskv.bench.process import RunFailed, run_job
from oasiskv.cli.options import split
from oasiskv.core.geometry import Geometry
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.demo.documents import FACTS, build_prompts
from oasiskv.demo.outcome import Outcome
from oasiskv.demo.plan import MODEL, OUTPUT_TOKENS, PROMPT_TOKENS, TITLES, make_jobs
from oasiskv.demo.report import MIB, as_json, formula, markdown, table, verdict
from oasiskv.installed import InstallError, check_vllm
from oasiskv.models import FetchError, load_tokenizer, resolve_model
from oasiskv.models.data import essays


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 if OasisKV kept its promises, else 1 (2: it could not be run)."""
    console = Console()
    try:
        return demo(sys.argv[1:] if arguments is None else arguments, console)
    except (SettingsError, InstallError, FetchError, RunFailed) as error:
        console.print(f"The demo could not be run. {error}", style="red", markup=False)
        return 2


def demo(arguments: Sequence[str], console: Console) -> int:
    """Fetch what is missing, run the rows one after another, print the table and the verdict."""
    given, rest = split(arguments)
    args = parser().parse_args(rest)
    settings = Settings.parse(given)
    geometry = Geometry.of(settings, OASIS_BLOCK)
    check_vllm()
    folder = resolve_model(MODEL)
    text = essays(console)
    tokenizer = load_tokenizer(folder)
    prompts = build_prompts(lambda t: tokenizer(t, add_special_tokens=False)["input_ids"], text, PROMPT_TOKENS)
    model = Model.of(MODEL, folder, json.loads((Path(folder) / "config.json").read_text()))
    memory, jobs = make_jobs(model, prompts, OUTPUT_TOKENS, settings.changed())
    changed = ", ".join(f"{name}={value}" for name, value in settings.changed().items()) or "defaults"
    console.print(
        f"[bold]{MODEL}: {len(FACTS)} requests at once, each a document of {PROMPT_TOKENS:,} tokens with a question; "
        f"{OUTPUT_TOKENS} tokens of output.[/]\n"
        f"The KV pool of {memory.pool_bytes / MIB:.0f} MiB holds fewer than three of them. OasisKV ({changed}) has "
        f"{memory.host_bytes / MIB:,.0f} MiB of host memory beside it; a third row gives stock vLLM both, which on a "
        "CPU are the same memory. Each engine has a process of its own and every core.",
        highlight=False,
    )
    outcomes = []
    began = time.perf_counter()
    for job in jobs:
        outcomes.append(Outcome.of(run_job(job, TITLES[job.row], console), prompts))
    expected, line = formula(outcomes[[j.row for j in jobs].index(OASIS)], geometry, PROMPT_TOKENS)
    wrong = verdict(outcomes, expected)
    console.print()
    console.print(table(outcomes, memory))
    console.print(line, highlight=False, soft_wrap=True)
    for job, outcome in zip(jobs, outcomes, strict=True):
        took = outcome.figures
        console.print(f"{TITLES[job.row]}: {took.load_seconds:.0f} s to load, {took.seconds:.0f} s to run.")
    console.print(f"All: {time.perf_counter() - began:.0f} s.")
    if args.markdown:
        print(markdown(outcomes, memory))
    if args.json:
        args.json.write_text(
            json.dumps(as_json(outcomes, memory, settings.changed(), expected, wrong), indent=2) + "\n"
        )
    for sentence in wrong:
        console.print(sentence, style="bold red")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    """The command line, besides OasisKV's settings, which are taken as `oasiskv serve` takes them."""
    found = argparse.ArgumentParser(
        prog="python -m oasiskv.demo",
        description="Stock vLLM and OasisKV on long documents, in the same KV memory.",
        epilog="OasisKV's settings can be given too: --budget-tokens 1024 --scorer box ...",
        allow_abbrev=False,
    )
    found.add_argument("--json", type=Path, metavar="PATH", help="write the numbers to a file")
    found.add_argument("--markdown", action="store_true", help="print the table as Markdown too")
    return found


if __name__ == "__main__":
    sys.exit(main())
