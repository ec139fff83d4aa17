"""Many-shot arithmetic: worked problems one after the other, then one that takes many steps to work out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from oasiskv.eval.tasks.haystack import vocabulary
from oasiskv.eval.tasks.types import Document, Encode, Question
from oasiskv.models.data import essays

HEADER = (
    "Each problem begins with a number. Each word after it adds to the number or takes from it. "
    "Work out the number step by step.\n\n"
)
ANSWER = re.compile(r"Answer: (\d+)")
LARGEST = 20
"""Sums stay from 0 to this: what a small model can do, if any."""


@dataclass(frozen=True)
class ManyShotArithmetic:
    """Running sums whose steps bear names, so that each line of the reasoning must look up its step in the problem.

    ``Problem: 3, answer + 2, garden - 4`` is worked out as ``Steps: 3, answer + 2 = 5, garden - 4 = 1``.
    """

    name: str
    steps: int = 64
    """Of the problem asked: 9 tokens of reasoning each, so 64 of them are longer than a budget of 512 tokens."""
    shot_steps: int = 8
    """Of each worked problem in the document."""
    text: Callable[[], str] = essays

    def document(self, encode: Encode, tokens: int, questions: int, seed: int) -> Document:
        """As many worked problems as fit in ``tokens`` tokens: fewer tokens by up to a problem, which is about 120."""
        source = Random(seed)
        words = vocabulary(self.text())
        prompt = list(encode(HEADER))
        shots = 0
        while (
            len(shot := list(encode("".join(_worked(source, words, self.shot_steps)) + "\n\n"))) + len(prompt) <= tokens
        ):
            prompt += shot
            shots += 1
        if not shots:
            raise ValueError(f"{tokens} tokens hold no worked problem: {len(prompt) + len(shot)} or more")
        found = []
        for _ in range(questions):
            problem, reasoning = _worked(source, words, self.steps)
            answer = list(encode(reasoning))
            limit = len(answer) + len(answer) // 8
            found.append(Question(list(encode(problem)), answer, (reasoning.rsplit(" ", 1)[1],), limit))
        return Document(self.name, prompt, tuple(found))

    def score(self, question: Question, answer: str) -> float:
        """1 if the first "Answer:" gives the right number, however it was reached."""
        found = ANSWER.search(answer)
        return float(found is not None and found[1] in question.expected)


def _worked(source: Random, words: Sequence[str], steps: int) -> tuple[str, str]:
    """A problem up to where its reasoning begins, and the reasoning with the answer."""
    total = source.randint(0, LARGEST)
    problem = reasoning = f" {total}"
    for word in source.sample(words, steps):
        change = source.choice([n for n in range(-9, 10) if n and 0 <= total + n <= LARGEST])
        step = f", {word} {'+' if change > 0 else '-'} {abs(change)}"
        total += change
        problem += step
        reasoning += f"{step} = {total}"
    return f"Problem:{problem}\nSteps:", f"{reasoning}\nAnswer: {total}"
