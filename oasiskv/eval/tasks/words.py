"""Common words: a long list in which ten words come back often. Which are they?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from oasiskv.eval.tasks.haystack import vocabulary
from oasiskv.eval.tasks.types import Document, Encode, Question
from oasiskv.models.data import essays

HEADER = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
QUESTION = (
    "\n\nQuestion: What are the {count} most common words in the above list? "
    "Answer: The top {count} words that appear most often in the list are: "
)
SHARE = 1 / 3
"""Of the list, taken by the common words, as in RULER at 4,096 tokens; in a short list more."""
LEAST_OFTEN = 3
"""Times that a common word appears at least; another appears once then."""
RATIO = 10
"""How much more often a common word appears than another, as in RULER."""
SLACK = 4
"""Tokens that a free answer may take beyond the right one."""


@dataclass(frozen=True)
class CommonWords:
    """The common words of RULER (Hsieh et al., 2024); each question gives some of them, and asks for the others."""

    name: str
    count: int = 10
    """Common words in a list."""
    given: int = 3
    """How many of them the question gives, others each time; they also show a small model how to go on."""
    text: Callable[[], str] = essays

    def document(self, encode: Encode, tokens: int, questions: int, seed: int) -> Document:
        """A list that just fits in ``tokens`` tokens: one or two in a hundred fewer."""
        source = Random(seed)
        words = list(vocabulary(self.text()))
        source.shuffle(words)
        header = list(encode(HEADER))
        room = tokens - len(header)

        def listed(entries: int) -> list[int]:
            return list(encode(numbered(_repeated(words, self.count, entries, Random(seed)))))

        entries = room // 4
        for _ in range(4):  # the length is nearly proportional to the entries
            entries = entries * room // len(listed(entries))
        while len(body := listed(entries)) > room:
            entries -= 1
        found = []
        for _ in range(questions):
            common = source.sample(words[: self.count], self.count)
            given = numbered(common[: self.given])
            answer = list(encode(numbered(common).removeprefix(given)))
            question = list(encode(QUESTION.format(count=self.count) + given))
            found.append(Question(question, answer, tuple(common[self.given :]), len(answer) + SLACK))
        return Document(self.name, header + body, tuple(found))

    def score(self, question: Question, answer: str) -> float:
        """Share of the common words (but the given ones) that the answer names."""
        return question.recall(answer)


def numbered(words: Sequence[str]) -> str:
    """As in ``1. able 2. garden``."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _repeated(words: Sequence[str], common: int, entries: int, source: Random) -> list[str]:
    """``entries`` words in random order, the first ``common`` of ``words`` much more often than the others.

    Raises:
        ValueError: too few entries for the common words, or too few words for the entries.
    """
    often = max(LEAST_OFTEN, int(SHARE * entries / common))
    if often * common > entries:
        raise ValueError(f"a list of {entries} words has no room for {common} common ones: more tokens")
    others = [word for word in words[common:] for _ in range(max(1, often // RATIO))][: entries - often * common]
    found = [word for word in words[:common] for _ in range(often)] + others
    if len(found) < entries:
        raise ValueError(f"{len(words)} different words make no list of {entries}: a longer text, or fewer tokens")
    source.shuffle(found)
    return found
