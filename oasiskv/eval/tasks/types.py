"""What flows from a task to whoever runs it: a long document, and several questions about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


@dataclass(frozen=True)
class Question:
    """What follows the document once, up to the first words of the answer: a small model must only go on."""

    text: list[int]
    """Token ids."""
    answer: list[int]
    """Token ids of the right answer as the model would go on: its likelihood is the finer score."""
    expected: tuple[str, ...]
    """What a free answer must contain."""
    max_tokens: int
    """Tokens of a free answer: the right one fits, a list of guesses does not."""

    def recall(self, answer: str) -> float:
        """Share of the expected strings that stand in ``answer`` as words of their own (RULER's score)."""
        found = [re.search(rf"(?<!\w){re.escape(text)}(?!\w)", answer) is not None for text in self.expected]
        return sum(found) / len(found)


@dataclass(frozen=True)
class Document:
    """A long context, prefilled once, and the questions about it."""

    task: str
    prompt: list[int]
    """Token ids; how many is said at the task's ``document``."""
    questions: tuple[Question, ...]


class Task(Protocol):
    """A generator of documents and the score of an answer; frozen, so that one object serves all."""

    @property
    def name(self) -> str:
        """As in ``TASKS``."""

    def document(self, encode: Encode, tokens: int, questions: int, seed: int) -> Document:
        """A document of at most ``tokens`` tokens, questions not counted. The same arguments give the same document.

        Raises:
            ValueError: ``tokens`` is too small for what so many questions need.
        """

    def score(self, question: Question, answer: str) -> float:
        """From 0 (wrong) to 1 (right), of the text that a model wrote after the question."""
