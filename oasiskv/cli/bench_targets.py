"""``oasiskv bench targets``: the speed targets, each measured over several rounds, and whether they are met."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from oasiskv.bench import target_report as report
from oasiskv.bench.cells import AUTO, BenchError, Cell, Model
from oasiskv.bench.engine_pool import EnginePool
from oasiskv.bench.runner import Runner, load_model, text_source
from oasiskv.bench.target_cases import CASES
from oasiskv.bench.target_file import Earlier, read
from oasiskv.bench.targets import Case, CaseResult, Measured, Play, play_round
from oasiskv.cli.options import Parser, UsageError
from oasiskv.eval.options import names
from oasiskv.installed import check_vllm
from oasiskv.models import FetchError
from oasiskv.report.output import Output, Report
from oasiskv.report.provenance import Provenance, provenance

DTYPES = (AUTO, "bfloat16", "float32")
NOTHING_MEASURED = 1
"""Exit status."""
NOTHING_EARLIER = Earlier()
Start = Callable[[Case], AbstractContextManager[tuple[Mapping[str, Cell], Play]]]
"""A case made ready: its cells by label, and how its runs are played. Entering it raises FetchError, BenchError."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = Parser(
        prog="oasiskv bench targets",
        description="Measure the speed targets beside stock vLLM. All of them take hours on two cores; --only NAME "
        "--rounds 1 is the short way.",
        allow_abbrev=False,
    )
    found.add_argument("--rounds", type=int, default=5, help="how often the runs of a case take turns (5)")
    found.add_argument("--only", type=names, metavar="A,B", help="these cases only, with commas between")
    found.add_argument(
        "--resume",
        type=Path,
        metavar="PATH",
        help="go on with what is in this file, until each case has its rounds; it is written anew after every round",
    )
    found.add_argument(
        "--dtype",
        choices=DTYPES,
        default=AUTO,
        help="type of the weights and the KV cache, as in vLLM: auto (the model's own) or another, such as float32 on "
        "a CPU that does not compute in bfloat16",
    )
    found.add_argument("--list", action="store_true", help="show the cases and their targets, and measure nothing")
    Output.options(found, "bench-targets.html")
    return found


def chosen(only: Sequence[str] | None) -> list[Case]:
    """The cases with these names, in the order of the table; None: all.

    Raises:
        UsageError: a name is not known, or there is none.
    """
    unknown = [name for name in only or () if name not in CASES]
    if unknown or only == []:
        wrong = f"there is no case {unknown[0]!r}" if unknown else "--only names nothing"
        raise UsageError(f"{wrong}; allowed are {', '.join(CASES)}, with commas between")
    return [case for name, case in CASES.items() if only is None or name in only]


def run(arguments: Sequence[str]) -> None:
    """Run the command: progress on the way, then the table, sentences and the page."""
    args = parser().parse_args(list(arguments))
    cases = chosen(args.only)
    if args.list:
        show_cases(cases)
        return
    if args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds} is not allowed: 1 or more")
    if args.resume and args.json:
        raise UsageError("--json beside --resume is not allowed: the numbers go to the file of --resume")
    args.json = args.resume or args.json
    output = Output.of(args)
    check_vllm()
    made = provenance(["oasiskv", "bench", "targets", *arguments])
    earlier = read(args.resume, CASES, made, args.dtype) if args.resume else NOTHING_EARLIER
    progress = Console(stderr=True)
    results = measure(cases, args.rounds, Engines(progress, args.dtype), output, made, Console(), progress, earlier)
    if not any(result.rounds for result in results):
        raise SystemExit(NOTHING_MEASURED)


def show_cases(cases: Sequence[Case]) -> None:
    """Print the cases and their targets."""
    for case in cases:
        print(f"{case.name}: {case.about} ({case.model})")
        for target in case.targets:
            print(f"  {target.title}")


def measure(
    cases: Sequence[Case],
    rounds: int,
    start: Start,
    output: Output,
    made: Provenance,
    console: Console,
    progress: Console,
    earlier: Earlier = NOTHING_EARLIER,
) -> list[CaseResult]:
    """Case by case, until each has ``rounds``; whatever happens, all finished rounds are delivered.

    A case that cannot be started is left out, and the result says why.
    """
    results = {result.case.name: result for result in earlier.results}
    result: CaseResult | None = None

    def made_so_far() -> Report:
        order = list(CASES)
        known = [name for name in order if name in results]
        return report.make([results[name] for name in known + [n for n in results if n not in order]], earlier.made)

    try:
        for number, case in enumerate(cases, 1):
            result = results.setdefault(case.name, CaseResult(case))
            progress.print(f"[bold]{number} of {len(cases)}: {case.name}: {case.about}", highlight=False)
            for _ in _measure_case(result, rounds, start):
                output.save(made_so_far(), made)
            if len(cases) > 1:
                console.print(report.table([result]).rich())
                for sentence in report.stops([result]):
                    console.print(sentence, highlight=False, markup=False)
    except BaseException as error:
        if result is not None:
            result.stopped = _in_one_line(error)
        raise
    finally:
        output.deliver(made_so_far(), made, console)
    return list(results.values())


def _measure_case(result: CaseResult, rounds: int, start: Start) -> Iterator[None]:
    """Play the rounds that are missing; stops after each."""
    missing = range(len(result.rounds), rounds)
    if not missing:
        return
    result.stopped = ""
    with ExitStack() as stack:
        try:
            cells, play = stack.enter_context(start(result.case))
        except (FetchError, BenchError) as error:
            result.stopped = _in_one_line(error)
            return
        result.cells = {label: {**cell.as_dict(), "options": list(cell.options)} for label, cell in cells.items()}
        for number in missing:
            result.rounds.append(play_round(result.case, number, play))
            yield


def _in_one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__


class Engines:
    """Makes cases ready to run in engines of their own. A model is asked for once, also one that cannot be fetched.

    Args:
        progress: where progress is shown.
        dtype: one of :data:`DTYPES`.
    """

    def __init__(self, progress: Console, dtype: str = AUTO) -> None:
        self._progress, self._dtype = progress, dtype
        self._models: dict[str, Model | FetchError] = {}

    @contextmanager
    def __call__(self, case: Case) -> Iterator[tuple[Mapping[str, Cell], Play]]:
        """See :data:`Start`."""
        model = self._model(case.model)
        cells = {label: contender.cell(model).with_dtype(self._dtype) for label, contender in case.runs.items()}
        for cell in cells.values():
            cell.check(model)
        texts = {label: text_source(model, cell, case.cut) for label, cell in cells.items()}
        with EnginePool(self._progress) as engines:
            runners = {
                label: Runner(model, text, engines, self._progress, report.title(label))
                for label, text in texts.items()
            }

            def play(label: str, batch: int) -> Measured:
                return Measured(*runners[label](cells[label], case.runs[label].row, batch))

            yield cells, play

    def _model(self, name: str) -> Model:
        if name not in self._models:
            try:
                self._models[name] = load_model(name, self._dtype)
            except FetchError as error:
                self._models[name] = error
        found = self._models[name]
        if isinstance(found, FetchError):
            raise found
        return found
