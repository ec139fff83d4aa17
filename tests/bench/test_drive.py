"""The driver, with an engine and a clock that a test can read: who is asked when, and what is noted."""

from __future__ import annotations

from collections.abc import Sequence

from oasiskv.bench.drive import Observed, Progress, drive
from oasiskv.bench.job import Conversation, Turn


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Prefills a request in its first step, then makes one token for each in every step; each takes ``seconds``."""

    def __init__(self, clock: Clock, seconds: float = 1.0) -> None:
        self.clock, self.seconds = clock, seconds
        self.open: dict[str, tuple[list[int], int, list[int]]] = {}
        self.asked: list[tuple[str, list[int], float]] = []
        self.most = 0

    def add(self, name: str, tokens: Sequence[int], output: int) -> None:
        self.asked.append((name, list(tokens), self.clock.now))
        self.open[name] = (list(tokens), output, [])
        self.most = max(self.most, len(self.open))

    def step(self) -> Sequence[Progress]:
        self.clock.now += self.seconds
        self.prefilled = sum(len(prompt) for prompt, _, answer in self.open.values() if not answer)
        found = []
        for name, (_, output, answer) in list(self.open.items()):
            answer.append(900 + len(answer))
            found.append(Progress(name, answer, len(answer) == output, "text of " + name))
            if len(answer) == output:
                del self.open[name]
        return found

    def observe(self) -> Observed:
        held = (4,) * len(self.open)
        return Observed(len(self.open), self.prefilled, held, fetched=10, pipeline=0.25, shortest=500, scheduler=0.01)


def plain(count: int, output: int = 3) -> list[Conversation]:
    return [Conversation(f"r{i}", (Turn((i, i), output),)) for i in range(count)]


def test_no_more_are_in_flight_than_allowed_and_all_are_answered() -> None:
    clock = Clock()
    engine = FakeEngine(clock)
    samples, answers = drive(engine, plain(5), 2, clock=clock)
    assert engine.most == 2
    assert [answer.name for answer in answers] == ["r0", "r1", "r2", "r3", "r4"]
    assert sum(sample.new_tokens for sample in samples) == 15
    assert len(samples) == 9  # three rounds of three steps: two requests, two, and one


def test_a_step_is_timed_and_what_the_engine_says_is_kept() -> None:
    clock = Clock()
    samples, _ = drive(FakeEngine(clock, seconds=0.5), plain(2), 2, clock=clock)
    assert [s.seconds for s in samples] == [0.5] * 3
    assert [s.prefilled for s in samples] == [4, 0, 0]
    assert [s.only_decodes for s in samples] == [False, True, True]
    assert [(s.answering, s.shortest, s.scheduler) for s in samples] == [(2, 500, 0.01)] * 3
    assert (samples[0].blocks, samples[0].fetched, samples[0].pipeline) == ((4, 4), 10, 0.25)


def test_an_answer_knows_when_it_was_asked_for_began_and_ended() -> None:
    clock = Clock()
    _, answers = drive(FakeEngine(clock), plain(2), 1, clock=clock)
    assert [(a.arrived, a.first, a.last, a.tokens) for a in answers] == [(0.0, 1.0, 3.0, 3), (3.0, 4.0, 6.0, 3)]
    assert answers[0].text == "text of r0/0"


def test_a_turn_stands_on_all_before_it_and_waits_behind_the_others() -> None:
    clock = Clock()
    engine = FakeEngine(clock)
    chats = [Conversation(name, (Turn((1, 2), 2), Turn((3,), 2))) for name in ("a", "b")]
    drive(engine, chats, 1, clock=clock)
    assert [name for name, _, _ in engine.asked] == ["a/0", "b/0", "a/1", "b/1"]
    assert engine.asked[2][1] == [1, 2, 900, 901, 3]
