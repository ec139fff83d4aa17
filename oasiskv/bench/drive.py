"""Drives an engine through conversations, step by step, and notes what every step and every answer took.

Knows nothing of vLLM: the engine is anything with the three methods of :class:`Steppable`, the clock can be given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oasiskv.bench.job import Answer, Conversation, Sample


@dataclass(frozen=True)
class Progress:
    """Where an answer is after a step."""

    name: str
    tokens: Sequence[int]
    finished: bool
    text: str = ""


@dataclass(frozen=True)
class Observed:
    """What is to be seen of an engine after a step; the fields are those of :class:`Sample`."""

    running: int
    prefilled: int
    blocks: tuple[int, ...]
    fetched: int = 0
    pipeline: float = 0.0
    shortest: int = 0
    scheduler: float = 0.0


class Steppable(Protocol):
    """An engine in this process."""

    def add(self, name: str, tokens: Sequence[int], output: int) -> None:
        """Submit a request that answers exactly ``output`` tokens, greedily."""

    def step(self) -> Sequence[Progress]:
        """One step: the answers that grew."""

    def observe(self) -> Observed:
        """What the engine holds now, and has done since the last call."""


@dataclass
class _Open:
    """A request under way."""

    conversation: Conversation
    turn: int
    prompt: list[int]
    arrived: float
    first: float = 0.0
    answer: list[int] = field(default_factory=list)


def drive(
    engine: Steppable,
    conversations: Sequence[Conversation],
    concurrency: int,
    on_step: Callable[[Sequence[Sample]], None] = lambda samples: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Sample], list[Answer]]:
    """Ask everything, with at most ``concurrency`` requests in flight; a next turn queues up behind all that wait."""
    waiting: deque[tuple[Conversation, int, Sequence[int]]] = deque((c, 0, ()) for c in conversations)
    open_: dict[str, _Open] = {}
    samples: list[Sample] = []
    answers: list[Answer] = []
    start = clock()
    while waiting or open_:
        while waiting and len(open_) < concurrency:
            conversation, turn, history = waiting.popleft()
            prompt = [*history, *conversation.turns[turn].tokens]
            name = f"{conversation.name}/{turn}"
            open_[name] = _Open(conversation, turn, prompt, clock() - start)
            engine.add(name, prompt, conversation.turns[turn].output)
        began, before = clock(), sum(len(o.answer) for o in open_.values())
        grown = engine.step()
        ended = clock()
        answering = sum(len(progress.tokens) > len(open_[progress.name].answer) for progress in grown)
        for progress in grown:
            own = open_[progress.name]
            own.first = own.first or (ended - start if progress.tokens else 0.0)
            own.answer = list(progress.tokens)
        new_tokens = sum(len(o.answer) for o in open_.values()) - before
        for progress in grown:
            if progress.finished:
                own = open_.pop(progress.name)
                answers.append(_answer(own, ended - start, progress.text))
                if own.turn + 1 < len(own.conversation.turns):
                    waiting.append((own.conversation, own.turn + 1, own.prompt + own.answer))
        seen = engine.observe()
        samples.append(
            Sample(
                ended - began,
                seen.running,
                seen.prefilled,
                new_tokens,
                seen.blocks,
                seen.fetched,
                seen.pipeline,
                answering,
                seen.shortest,
                seen.scheduler,
            )
        )
        on_step(samples)
    return samples, answers


def _answer(own: _Open, now: float, text: str) -> Answer:
    return Answer(own.conversation.name, own.turn, len(own.prompt), own.arrived, own.first, now, len(own.answer), text)
