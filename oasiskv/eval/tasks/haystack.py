"""Natural text with needles in it: sentences of the essays, and between them what is to be found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from oasiskv.eval.tasks.types import Encode

SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s+[\"“(]?[A-Z])")
WORD = re.compile(r"(?<![\w'\u2019-])[a-z]{4,8}(?![\w'\u2019-])")  # no part of a hyphened or shortened word
LEAST_OFTEN = 3
"""How often a word must occur in a text to count as one of its words: rarer ones are names and slips."""
GOLDEN = 0.618034
"""Its multiples, modulo one, lie far apart: so do the beginnings of documents whose seeds follow one another."""


def hide(encode: Encode, text: str, needles: Sequence[str], tokens: int, seed: int) -> list[int]:
    """Exactly ``tokens`` tokens: a stretch of ``text`` with ``needles`` among its sentences, in their order.

    Each needle stands after the end of a sentence, anywhere in its own of ``len(needles)`` equal parts. Where the
    stretch begins depends on the seed; a text that ends starts over. The last sentence is cut off where it must be.

    Raises:
        ValueError: the needles leave no room for text.
    """
    pieces = [list(encode(needle)) for needle in needles]
    room = tokens - sum(map(len, pieces))
    if room < 1:
        needed = f"{len(pieces)} needles of {tokens - room} tokens"
        raise ValueError(f"{tokens} tokens of text have no room for {needed}: more tokens, or fewer questions")
    body = _sentences(encode, text, room, seed)
    source = Random(seed)
    after = [int((number + source.random()) / len(pieces) * (len(body) - 1)) for number in range(len(pieces))]
    found: list[int] = []
    placed = 0
    for number, sentence in enumerate(body):
        found += sentence
        while placed < len(pieces) and after[placed] == number:
            found += pieces[placed]
            placed += 1
    return found


@lru_cache(maxsize=2)
def vocabulary(text: str) -> tuple[str, ...]:
    """The text's short lower-case words that occur several times, in alphabetical order."""
    return tuple(sorted(word for word, often in Counter(WORD.findall(text)).items() if often >= LEAST_OFTEN))


@lru_cache(maxsize=2)
def _split(text: str) -> tuple[str, ...]:
    return tuple(SENTENCE_END.split(text))


def _sentences(encode: Encode, text: str, tokens: int, seed: int) -> list[list[int]]:
    """Token ids of whole sentences, each with the white space before it; the last is cut so that all fit exactly."""
    split = _split(text)
    number = int(seed * GOLDEN % 1 * len(split))
    found: list[list[int]] = []
    while tokens > 0:
        sentence = split[number % len(split)]
        found.append(list(encode(sentence if found else sentence.lstrip()))[:tokens])
        tokens -= len(found[-1])
        number += 1
    return found
