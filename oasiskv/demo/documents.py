"""The demo's prompts: long documents, each with a fact hidden in it and a question about it, and who answers right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FACTS = (
    ("Lisbon", "4812"),
    ("Oslo", "7035"),
    ("Cairo", "2964"),
    ("Lima", "8157"),
    ("Kyoto", "3690"),
    ("Dublin", "5273"),
    ("Havana", "9418"),
    ("Vienna", "6341"),
)
"""A city and its number for each document."""
FACT = " The special magic number for {city} is {number}."
QUESTION = "\n\nWhat is the special magic number for {city}? The special magic number for {city} is"
"""RULER's wording (Hsieh et al., 2024), the first words of the answer given: a small model must only look it up."""
FIRST_DEPTH, LAST_DEPTH = 0.1, 0.9
"""How far into their documents the first and the last fact lie; the others lie evenly between."""
NEAR = 24
"""Characters of an answer in which its number must begin."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of one document with its question, and the number that answers it."""

    ids: list[int]
    city: str
    number: str


def build_prompts(
    encode: Callable[[str], Sequence[int]], text: str, tokens: int, facts: Sequence[tuple[str, str]] = FACTS
) -> list[Prompt]:
    """One prompt of exactly ``tokens`` tokens for each fact, cut from ``text`` at as many different places.

    The fact stands after the end of a sentence, at a different depth in each document.

    Args:
        encode: text to token ids, without special tokens.

    Raises:
        ValueError: the text is too short for documents that do not overlap.
    """
    source = list(encode(text))
    stop = list(encode("."))[-1]
    stride = len(source) // len(facts)
    if stride < tokens:
        raise ValueError(f"a text of {len(source)} tokens is too short for {len(facts)} documents of {tokens} tokens")
    prompts = []
    for i, (city, number) in enumerate(facts):
        fact = list(encode(FACT.format(city=city, number=number)))
        question = list(encode(QUESTION.format(city=city)))
        document = source[i * stride : i * stride + tokens - len(fact) - len(question)]
        depth = FIRST_DEPTH + (LAST_DEPTH - FIRST_DEPTH) * i / max(1, len(facts) - 1)
        at = _after_sentence(document, int(depth * len(document)), stop)
        prompts.append(Prompt(document[:at] + fact + document[at:] + question, city, number))
    return prompts


def is_right(answer: str, number: str) -> bool:
    """Whether the first number in ``answer`` is ``number`` and stands near its beginning."""
    found = re.search(r"\d+", answer)
    return found is not None and found.start() <= NEAR and found.group() == number


def _after_sentence(document: Sequence[int], wanted: int, stop: int) -> int:
    """Where the first sentence ends that ends at or after ``wanted``, or ``wanted`` if none does."""
    try:
        return document.index(stop, max(0, wanted - 1)) + 1
    except ValueError:
        return wanted
