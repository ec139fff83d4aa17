"""What is asked of an engine: prompts of an exact length, by name of the workload."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oasiskv.bench.job import Conversation, Turn


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens, and the usual number of requests and budget (None: the setting's).

    ``fill``: prompts are not computed, their KV is drawn (:mod:`oasiskv.vllm_plugin.filled`). With more ``turns`` than
    one, ``prompt`` is the first turn's and each later one brings ``turn_tokens`` more.
    """

    name: str
    about: str
    prompt: int
    output: int
    turns: int = 1
    turn_tokens: int = 0
    fill: bool = False
    requests: int = 8
    budget: int | None = None

    @property
    def context(self) -> int:
        """Tokens of a conversation at its end."""
        return self.prompt + self.output + (self.turns - 1) * (self.turn_tokens + self.output)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("long-context", "long prompt, short answer", prompt=6000, output=128),
        Workload("reasoning", "short prompt, long answer", prompt=200, output=3000),
        Workload("multi-turn", "a shared, growing prefix", prompt=3000, output=64, turns=4, turn_tokens=64),
        Workload("decode", "contexts filled without computing them", prompt=7000, output=128, fill=True),
        Workload("serve", "both servers, requests at random times", prompt=3000, output=128),
    )
}
"""With their usual lengths."""

QUICK = {
    "long-context": replace(WORKLOADS["long-context"], prompt=3000, output=64, requests=6, budget=1024),
    "reasoning": replace(WORKLOADS["reasoning"], output=500, requests=6, budget=256),
    "multi-turn": replace(WORKLOADS["multi-turn"], prompt=1500, output=32, turns=3, requests=4, budget=512),
    "decode": replace(WORKLOADS["decode"], prompt=6000, output=64),
    "serve": replace(WORKLOADS["serve"], prompt=1500, output=64, requests=6, budget=512),
}
"""Small ones: minutes on two cores."""

Source = Callable[[int, int], Sequence[int]]
"""``(number, tokens)`` to the token ids of the request with that number."""
REPEATED_TOKENS = 64
"""Length of a piece of :func:`repetitions`."""


def conversations(workload: Workload, requests: int, source: Source) -> tuple[Conversation, ...]:
    """``requests`` conversations of the workload's lengths, each with a text of its own."""
    found = []
    for i in range(requests):
        later = (workload.turns - 1) * workload.turn_tokens
        text = list(source(i, workload.prompt + later))
        cut = [0, *range(workload.prompt, len(text) + 1, max(1, workload.turn_tokens))][: workload.turns + 1]
        turns = tuple(Turn(tuple(text[a:b]), workload.output) for a, b in itertools.pairwise(cut))
        found.append(Conversation(f"request-{i}", turns))
    return tuple(found)


def slices(text: Sequence[int], requests: int) -> Source:
    """Pieces of one long text, evenly spread over it; it starts over where it ends."""

    def piece(number: int, tokens: int) -> Sequence[int]:
        start = number * len(text) // max(1, requests)
        repeats = (start + tokens) // len(text) + 1
        return (list(text) * repeats)[start : start + tokens]

    return piece


def repetitions(text: Sequence[int], requests: int) -> Source:
    """A short piece of one long text over and over, each request another piece: what an n-gram drafter foresees."""
    pieces = slices(text, requests)

    def repeated(number: int, tokens: int) -> Sequence[int]:
        return list(itertools.islice(itertools.cycle(pieces(number, REPEATED_TOKENS)), tokens))

    return repeated


def random_tokens(vocabulary: int, seed: int = 0) -> Source:
    """Random token ids: for filled contexts, and where no text is at hand."""

    def piece(number: int, tokens: int) -> Sequence[int]:
        dice = random.Random(1_000_003 * seed + number)
        return [dice.randrange(vocabulary // 2) for _ in range(tokens)]

    return piece
