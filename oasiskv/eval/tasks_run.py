"""``oasiskv eval tasks``: retrieval and reasoning over long contexts, dense and at several budgets on the same inputs.

In the engine itself. Every document is computed once; each question is then answered by dense attention and at every
budget, freely (scored) and by force (the likelihood of the right answer, which tells engines apart even where the model
is too small to answer). ``--decode-question`` feeds the question token by token through sparse steps instead of
prefilling it: what a model does that looks something up in the middle of a long answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from oasiskv.eval.engine import Ask, EvalEngine
from oasiskv.eval.options import add_budgets, bar, names
from oasiskv.eval.statistics import Interval, paired
from oasiskv.eval.tasks import TASKS, Document, Question
from oasiskv.report.output import Report
from oasiskv.report.page import Section
from oasiskv.report.table import Table
from oasiskv.vllm_plugin.trace import Trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NOTES = (
    "Score: mean over questions, 0 to 100. Difference to dense on the same questions, in points, with 95 % intervals, "
    "resampling documents (questions where there are fewer than three)."
)
LIKELIHOOD_NOTES = "Nats per token of the right answer, forced; difference to dense as above. Less is better."


QUICK = {"length": 4000, "documents": 1, "questions": 4}
"""Sizes for minutes on two cores."""


@dataclass(frozen=True)
class Answered:
    """One question in one arm (``budget`` None: dense): its score, 0 to 1, and the right answer's nats per token."""

    task: str
    document: int
    budget: int | None
    score: float
    nll: float


def ask(
    engine: EvalEngine,
    documents: Sequence[Document],
    budgets: Sequence[int],
    score: Callable[[str, Question, list[int]], float],
    decode_question: bool,
    done: Callable[[], None],
) -> list[Answered]:
    """Put every question to dense attention and to every budget. ``score(task, question, answer tokens)``."""
    found = []
    for number, document in enumerate(documents):
        engine.read([document.prompt], done)
        for budget in (None, *budgets):
            free, forced = [], []
            for question in document.questions:
                lead = list(question.text) if decode_question else []
                prompt = [*document.prompt, *([] if decode_question else question.text)]
                free.append(Ask(prompt, question.max_tokens, budget, Trace(lead) if lead else None))
                forced.append(Ask(prompt, 1, budget, Trace([*lead, *question.answer])))
            answers = engine.answer([*free, *forced], done)
            for question, answer, along in zip(document.questions, answers, forced, strict=False):
                assert along.trace is not None
                nats = along.trace.nll[-len(question.answer) :]
                found.append(
                    Answered(
                        document.task, number, budget, score(document.task, question, answer), sum(nats) / len(nats)
                    )
                )
    return found


def difference(found: Sequence[Answered], budget: int, task: str | None, figure: str) -> Interval:
    """A budget less dense, paired by questions (which come in the same order in every arm)."""
    own = [a for a in found if task in (None, a.task)]
    pairs = zip([a for a in own if a.budget == budget], [a for a in own if a.budget is None], strict=True)
    values = [(getattr(a, figure) - getattr(b, figure), a.document) for a, b in pairs]
    return paired([value for value, _ in values], [document for _, document in values])


def mean(found: Sequence[Answered], budget: int | None, task: str | None, figure: str) -> float:
    """Over the questions of a task, or all."""
    values = [getattr(a, figure) for a in found if a.budget == budget and task in (None, a.task)]
    return sum(values) / len(values)


def _table(found: Sequence[Answered], figure: str, scale: float, digits: int, title: str, notes: str) -> Table:
    budgets = [b for b in dict.fromkeys(a.budget for a in found) if b is not None]
    tasks = list(dict.fromkeys(a.task for a in found))
    rows = []
    for task in (*tasks, None):
        count = sum(a.budget is None and task in (None, a.task) for a in found)
        cells = [f"{scale * mean(found, None, task, figure):.{digits}f}"]
        for budget in budgets:
            less = difference(found, budget, task, figure)
            cells.append(Interval(scale * less.mean, scale * less.low, scale * less.high).text(digits))
        rows.append((task or "all", str(count), *cells))
    columns = ("task", "questions", "dense", *(f"budget {budget:,}" for budget in budgets))
    return Table(title, columns, tuple(rows), notes)


def findings(found: Sequence[Answered]) -> list[str]:
    """Sentences."""
    sentences = []
    for budget in [b for b in dict.fromkeys(a.budget for a in found) if b is not None]:
        less = difference(found, budget, None, "score")
        count = sum(a.budget == budget for a in found)
        sentences.append(
            f"Budget {budget:,}: {100 * less.mean:+.1f} points ({100 * less.low:+.1f} to {100 * less.high:+.1f}) "
            f"against dense's {100 * mean(found, None, None, 'score'):.1f}, over {count} questions."
        )
    return sentences


def plot(found: Sequence[Answered]) -> Figure:
    """Scores by task."""
    from plotly import graph_objects as go

    tasks = list(dict.fromkeys(a.task for a in found))
    figure = go.Figure(layout={"title": "Score by task", "barmode": "group", "yaxis": {"title": "of 100"}})
    for budget in dict.fromkeys(a.budget for a in found):
        name = "dense" if budget is None else f"budget {budget:,}"
        figure.add_bar(name=name, x=tasks, y=[100 * mean(found, budget, task, "score") for task in tasks])
    return figure


def sections(found: Sequence[Answered], tables: Sequence[Table], how: str) -> list[Section]:
    """For the page."""
    return [Section(f"Tasks ({how})", findings(found), tables, [plot(found)])]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line of this measurement, besides model and output."""
    add_budgets(parser)
    shown = ",".join(TASKS)
    parser.add_argument("--tasks", type=names, default=list(TASKS), help=f"with commas ({shown})")
    parser.add_argument("--length", type=int, default=6000, help="tokens of each document (6000)")
    parser.add_argument("--documents", type=int, default=4, help="documents of each task (4)")
    parser.add_argument("--questions", type=int, default=6, help="questions about each document (6)")
    parser.add_argument("--decode-question", action="store_true", help="questions go through sparse steps too")
    parser.add_argument("--task-seed", type=int, default=0, help="of the first document (0)")


def check(args: argparse.Namespace) -> None:
    """Refuse unknown tasks.

    Raises:
        ValueError: which are allowed.
    """
    unknown = [name for name in args.tasks if name not in TASKS]
    if unknown:
        raise ValueError(f"there is no task {unknown[0]!r}; allowed are {', '.join(TASKS)}")


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest request: a document, its question and the answer."""
    return int(args.length) + ANSWER_ROOM


ANSWER_ROOM = 1100
"""Tokens for a question and its answer."""


def measure(args: argparse.Namespace, engine: EvalEngine, console: Console) -> Report:
    """Run it."""
    tokenizer = engine.tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    seeds = range(args.task_seed, args.task_seed + args.documents)
    documents = [
        TASKS[name].document(encode, args.length, args.questions, seed) for name in args.tasks for seed in seeds
    ]
    total = sum(1 + 2 * (1 + len(args.budgets)) * len(document.questions) for document in documents)
    with bar("tasks", total, console) as done:
        found = ask(
            engine, documents, args.budgets,
            lambda task, question, answer: TASKS[task].score(question, tokenizer.decode(answer)),
            args.decode_question, done,
        )  # fmt: skip
    how = "questions decoded" if args.decode_question else "questions prefilled"
    title = f"Tasks: {args.model}, documents of {args.length:,} tokens, {how}"
    tables = [
        _table(found, "score", 100, 1, title, NOTES),
        _table(found, "nll", 1, 3, "Likelihood of the right answers", LIKELIHOOD_NOTES),
    ]
    data = {"kind": "tasks", "decode_question": args.decode_question, "answers": [vars(a) for a in found]}
    return Report(f"Tasks: {args.model}", tables, findings(found), lambda: sections(found, tables, how), data)
