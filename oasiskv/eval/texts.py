"""Texts on which good policies differ from bad ones: key-value retrieval, where every answer lies in one place."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oasiskv.models.data import essays

TASK = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"


@dataclass(frozen=True)
class RetrievalText:
    """Token ids of a prompt (a JSON object of random pairs) and of what follows it (questions with their answers)."""

    prompt: list[int]
    continuation: list[int]
    is_value: list[bool]
    """For each token of the continuation: does it belong to an answer, which can be looked up in the prompt?"""


def key_value_text(tokenizer: Any, tokens: int, steps: int, seed: int) -> RetrievalText:
    """Random UUID pairs to fill ``tokens`` tokens, then "Key: .. Corresponding value: .." for random ones of them.

    The task and its wording are those of Liu et al., Lost in the Middle (2023). The same seed gives the same pairs.

    Args:
        tokenizer: a Hugging Face tokenizer.
        tokens: most tokens of the prompt; it ends with the last pair that fits.
        steps: tokens of the continuation; the last question may be cut off.
        seed: of the pairs and of the questions.
    """
    source = random.Random(seed)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt, pairs = object_of_pairs(encode, tokens, source)
    continuation: list[int] = []
    is_value: list[bool] = []
    while len(continuation) < steps:
        key, value = source.choice(pairs)
        question, answer, end = encode(lookup(key)), encode(value), encode('"\n\n')
        continuation += question + answer + end
        is_value += [False] * len(question) + [True] * len(answer) + [False] * len(end)
    return RetrievalText(prompt, continuation[:steps], is_value[:steps])


def object_of_pairs(
    encode: Callable[[str], Sequence[int]], tokens: int, source: random.Random
) -> tuple[list[int], list[tuple[str, str]]]:
    """Token ids of the task with a JSON object of as many random pairs as fit in ``tokens``, and the pairs.

    Raises:
        ValueError: not one pair fits.
    """
    closing = list(encode("}\n\n"))
    prompt = list(encode(TASK))
    pairs: list[tuple[str, str]] = []
    while True:
        pair = (_uuid(source), _uuid(source))
        piece = encode(("" if not pairs else ",\n ") + f"{json.dumps(pair[0])}: {json.dumps(pair[1])}")
        if len(prompt) + len(piece) + len(closing) > tokens:
            break
        pairs.append(pair)
        prompt += piece
    if not pairs:
        raise ValueError(f"tokens={tokens} is too small for one pair; use a few hundred or more")
    return prompt + closing, pairs


def lookup(key: str) -> str:
    """The question for ``key``, up to where its value begins."""
    return f'Key: "{key}"\nCorresponding value: "'


def _uuid(source: random.Random) -> str:
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def essay_text(tokenizer: Any, tokens: int, steps: int, seed: int) -> RetrievalText:
    """A piece of the essays, going on as it does: nothing in it is an answer."""
    source = tokenizer(essays(), add_special_tokens=False)["input_ids"]
    start = random.Random(seed).randrange(len(source))
    text = (source[start:] + source)[: tokens + steps]
    return RetrievalText(text[:tokens], text[tokens:], [False] * steps)
