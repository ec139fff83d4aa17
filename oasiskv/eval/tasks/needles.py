"""Needles: sentences that give a key its magic numbers, hidden in essays. Which numbers has this key?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from oasiskv.eval.tasks.haystack import hide, vocabulary
from oasiskv.eval.tasks.types import Document, Encode, Question
from oasiskv.models.data import essays

HEADER = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n\n"
)
ONE = (
    " The special magic number for {key} is: {value}.",
    "\n\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} is:",
)
SEVERAL = (
    " One of the special magic numbers for {key} is: {value}.",
    "\n\nWhat are all the special magic numbers for {key} mentioned in the provided text? "
    "The special magic numbers for {key} are: {value}",
)
"""A needle and a question. That for several numbers gives the first: without it a small model does not make a list."""
DIGITS = 7
SLACK = 4
"""Tokens that a free answer may take beyond the right one: too few for another number."""


@dataclass(frozen=True)
class Needles:
    """The needle tasks of RULER (Hsieh et al., 2024), with a key of its own for each question about a document."""

    name: str
    values: int = 1
    """Numbers of each key."""
    lookalikes: float = 0.0
    """Share of the document taken by needles with one number and other keys, which nobody asks for."""
    text: Callable[[], str] = essays

    def document(self, encode: Encode, tokens: int, questions: int, seed: int) -> Document:
        """Exactly ``tokens`` tokens, with ``questions`` x ``values`` needles and the look-alikes."""
        source, text = Random(seed), self.text()
        needle, asking = ONE if self.values == 1 else SEVERAL
        words = vocabulary(text)
        length = len(encode(needle.format(key="-".join(source.sample(words, 2)), value="0" * DIGITS)))
        others = int(self.lookalikes * tokens / length)
        keys = _keys(source, words, questions + others)
        pairs = [(key, number) for key in keys[:questions] for number in _numbers(source, self.values)]
        pairs += [(key, number) for key in keys[questions:] for number in _numbers(source, 1)]
        source.shuffle(pairs)
        header = list(encode(HEADER))
        needles = [needle.format(key=key, value=number) for key, number in pairs]
        body = hide(encode, text, needles, tokens - len(header), seed)
        found = []
        for key in keys[:questions]:
            numbers = [number for other, number in pairs if other == key]  # in the order of reading
            expected = tuple(numbers if self.values == 1 else numbers[1:])
            answer = list(encode((" " if self.values == 1 else ", ") + ", ".join(expected)))
            question = list(encode(asking.format(key=key, value=numbers[0])))
            found.append(Question(question, answer, expected, len(answer) + SLACK))
        return Document(self.name, header + body, tuple(found))

    def score(self, question: Question, answer: str) -> float:
        """Share of the key's numbers (but the given one) that the answer names."""
        return question.recall(answer)


def _keys(source: Random, words: Sequence[str], count: int) -> list[str]:
    """Different pairs of words, as in "quiet-garden"."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["-".join(source.sample(words, 2))] = None
    return list(found)


def _numbers(source: Random, count: int) -> list[str]:
    return [str(number) for number in source.sample(range(10 ** (DIGITS - 1), 10**DIGITS), count)]
