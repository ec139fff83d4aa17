"""Key-value retrieval: a JSON object of random UUIDs. Which value has this key?"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from oasiskv.eval.tasks.types import Document, Encode, Question
from oasiskv.eval.texts import lookup, object_of_pairs

SLACK = 4
"""Tokens that a free answer may take beyond the right one."""


@dataclass(frozen=True)
class KeyValues:
    """The key-value task of Liu et al., Lost in the Middle (2023): each pair looks like every other."""

    name: str
    given: int = 1
    """How many of a value's five groups the question gives: with none, a small model rarely hits the right line."""

    def document(self, encode: Encode, tokens: int, questions: int, seed: int) -> Document:
        """As many pairs as fit in ``tokens`` tokens: fewer tokens by up to a pair, which is about 90."""
        source = Random(seed)
        prompt, pairs = object_of_pairs(encode, tokens, source)
        if len(pairs) < questions:
            raise ValueError(
                f"{tokens} tokens hold {len(pairs)} pairs, not {questions}: more tokens, or fewer questions"
            )
        found = []
        for key, value in source.sample(pairs, questions):
            groups = value.split("-")
            given = "-".join(groups[: self.given])
            question = list(encode(lookup(key) + given))
            answer = list(encode(value.removeprefix(given)))
            found.append(Question(question, answer, tuple(groups[self.given :]), len(answer) + SLACK))
        return Document(self.name, prompt, tuple(found))

    def score(self, question: Question, answer: str) -> float:
        """Share of the value's groups (but the given ones) that the answer names."""
        return question.recall(answer)
