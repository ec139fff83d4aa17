"""Fidelity and tasks: from what the engine answered to tables; and what the command line refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.cli import eval as command
from oasiskv.cli.options import UsageError
from oasiskv.core.settings import SettingsError
from oasiskv.eval import fidelity, tasks_run
from oasiskv.eval.engine import Ask
from oasiskv.eval.fidelity import Arm, Fidelity
from oasiskv.eval.tasks import Document, Question
from oasiskv.eval.tasks_run import Answered, ask, difference, findings

# -- fidelity


def found() -> Fidelity:
    dense = np.full((2, 64), 2.0)
    more = np.tile([0.0, 0.1], (2, 32))
    kl = np.concatenate([np.full((1, 64), 0.02), np.full((1, 64), 0.2)])
    return Fidelity((3000, 1000), dense, (Arm(512, dense + more, kl, np.tile([True, True, False, True], (2, 16))),))


def test_fidelity_says_perplexity_divergence_and_same_tokens() -> None:
    dense, budget = fidelity.table(found(), "t").rows
    assert dense[1] == f"{math.exp(2):.2f}"
    assert budget[1] == f"{math.exp(2.05):.2f}"
    assert budget[2].startswith("+5.1")
    assert budget[3].startswith("+0.1100")
    assert budget[4].startswith("75.0")
    assert budget[5] == "50.0"


def test_fidelity_by_position_is_sorted_by_what_stands_before() -> None:
    rows = fidelity.by_context(found()).rows
    assert [row[0] for row in rows] == ["1,000", "3,000"]
    assert rows[0][1].startswith("+0.2000")


# -- tasks


def answered(budget: int | None, *scores: float) -> list[Answered]:
    return [Answered("needles", i // 2, budget, score, 1.0 - score) for i, score in enumerate(scores)]


def test_a_difference_is_paired_by_question() -> None:
    rows = answered(None, 1, 0, 1, 1, 1, 0, 1, 1) + answered(512, 1, 0, 0, 1, 1, 0, 0, 1)
    less = difference(rows, 512, "needles", "score")
    assert less.mean == pytest.approx(-0.25)
    assert less.low < -0.25 < less.high
    assert difference(rows, 512, None, "nll").mean == pytest.approx(0.25)
    assert findings(rows)[0].startswith("Budget 512: -25.0 points")


def test_equal_answers_have_no_difference_and_no_spread() -> None:
    rows = answered(None, 1, 0, 1, 0, 1, 0) + answered(512, 1, 0, 1, 0, 1, 0)
    less = difference(rows, 512, None, "score")
    assert (less.mean, less.low, less.high) == (0, 0, 0)


class FakeEngine:
    """Answers 7 densely and 8 at a budget; the right answer costs the budget's number of nats."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.was_read: list[Any] = []

    def read(self, prompts: Any, done: Any) -> None:
        self.was_read += prompts

    def answer(self, asks: list[Ask], done: Any) -> list[list[int]]:
        self.asked += asks
        for one in asks:
            if one.trace is not None:
                one.trace.nll = [float(one.budget or 0)] * len(one.trace.tokens)
        return [[7 if one.budget is None else 8] for one in asks]


@pytest.mark.parametrize("decode_question", [False, True])
def test_every_question_goes_to_every_arm_on_the_same_context(decode_question: bool) -> None:
    document = Document("needles", [1, 2, 3], (Question([4], [7, 7], ("7",), 5), Question([5, 6], [8], ("8",), 5)))
    engine = FakeEngine()

    def score(task: str, question: Question, answer: list[int]) -> float:
        return float(answer[0] == question.answer[0])

    rows = ask(engine, [document], [512, 1024], score, decode_question, lambda: None)  # type: ignore[arg-type]
    assert engine.was_read == [[1, 2, 3]]
    assert [(r.budget, r.score, r.nll) for r in rows] == [
        (None, 1, 0), (None, 0, 0), (512, 0, 512), (512, 1, 512), (1024, 0, 1024), (1024, 1, 1024),
    ]  # fmt: skip
    free, forced = engine.asked[1], engine.asked[3]
    assert free.prompt == ([1, 2, 3] if decode_question else [1, 2, 3, 5, 6])
    assert (list(free.trace.tokens) if free.trace else []) == ([5, 6] if decode_question else [])
    assert forced.trace is not None and list(forced.trace.tokens) == ([5, 6, 8] if decode_question else [8])


# -- the command line


@pytest.fixture
def small_context(tmp_path: Path) -> str:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 97, "max_position_embeddings": 4096}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["nothing"], UsageError, "no evaluation 'nothing'; allowed are coverage"),
        (["fidelity", "--budgets", "0"], UsageError, "whole numbers above 0"),
        (["fidelity", "--budgets", "64"], SettingsError, "no room for hot slots"),
        (["fidelity", "--budget-tokens", "512"], UsageError, "give --budgets"),
        (["tasks", "--tasks", "chess"], UsageError, "no task 'chess'; allowed are needle"),
        (["tasks", "--length", "5000"], UsageError, "take 6,100 tokens, .* has 4,096: use shorter ones"),
        (["coverage", "--tokens", "4000", "--steps", "200"], UsageError, "take 4,200 tokens"),
        (["fidelity", "--forced", "1"], UsageError, "--forced 1 is not allowed: 2 or more"),
        (["tasks", "--documents", "0"], UsageError, "--documents 0 is not allowed: 1 or more"),
        (["coverage", "--scorers", "best"], UsageError, "'best' is not allowed"),
        (["fidelity", "--scorer", "oracle"], SettingsError, "scorer='oracle' is not allowed"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    arguments: list[str], error: type[Exception], words: str, small_context: str
) -> None:
    with pytest.raises(error, match=words):
        command.run([*arguments[:1], "--no-html", "--model", small_context, *arguments[1:]])


def test_lengths_of_the_tasks_leave_room_for_the_answer() -> None:
    args = command.parser("tasks").parse_args(["--length", "1000"])
    assert tasks_run.longest(args) > 1000
