"""Which engines stay, and which give way."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from oasiskv.bench import engine_pool
from oasiskv.bench.cells import GIB
from oasiskv.bench.engine_pool import ENGINE_BYTES, EnginePool
from oasiskv.bench.job import Conversation, Job, Run, Turn
from oasiskv.bench.process import RunFailed

QUIET = Console(quiet=True)
SMALL = Job("dense", "m", (Conversation("a", (Turn((1,), 2),)),), 1, 128, GIB)
LARGE = replace(SMALL, row="oasis", settings={"host_gib": 4.0})
ANSWER = Run("dense", 32, 100, 1.0, 0, (), ())


class Machine:
    """Memory, and a log of what happened to the engines in it."""

    def __init__(self, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = int(gib * GIB)
        self.log: list[str] = []
        self.fails = ""
        machine = self

        class Process:
            def __init__(self, job: Job, title: str) -> None:
                self.row, self.bytes = job.row, job.kv_bytes + int((job.settings or {}).get("host_gib", 0) * GIB)
                machine.free -= self.bytes + ENGINE_BYTES
                machine.log.append(f"start {self.row}")

            def run(self, job: Job, title: str, console: Console) -> Run:
                if machine.fails == job.row:
                    raise RunFailed("broke off")
                machine.log.append(f"run {title}")
                return ANSWER

            def close(self) -> None:
                machine.free += self.bytes + ENGINE_BYTES
                machine.log.append(f"close {self.row}")

            def kill(self) -> None:
                machine.log.append(f"kill {self.row}")

        monkeypatch.setattr(engine_pool, "EngineProcess", Process)
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=machine.free))


def play(engines: EnginePool, *jobs: Job) -> None:
    for job in jobs:
        engines.run(job, job.row)


def test_engines_stay_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(20, monkeypatch)
    other = replace(SMALL, conversations=(Conversation("b", (Turn((3,), 4),)),))
    with EnginePool(QUIET) as engines:
        play(engines, SMALL, LARGE, LARGE, other)
    assert machine.log[:6] == ["start dense", "run dense", "start oasis", "run oasis", "run oasis", "run dense"]
    assert machine.log[6:] == ["close oasis", "close dense"]


def test_the_one_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(14, monkeypatch)
    third = replace(SMALL, row="limit", max_model_len=256)
    with EnginePool(QUIET) as engines:
        play(engines, SMALL, LARGE, SMALL)
        machine.log.clear()
        play(engines, third)
        assert machine.log == ["close oasis", "start limit", "run limit"]
        play(engines, LARGE)  # too large for both others: the first to go is enough
        assert machine.log[3:] == ["close dense", "start oasis", "run oasis"]


def test_who_breaks_off_is_gone_and_the_others_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(20, monkeypatch)
    machine.fails = "oasis"
    with pytest.raises(RunFailed), EnginePool(QUIET) as engines:
        play(engines, SMALL, LARGE)
    assert machine.log == ["start dense", "run dense", "start oasis", "kill oasis", "kill dense"]


def test_an_accelerator_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(20, monkeypatch)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with EnginePool(QUIET) as engines:
        play(engines, SMALL, SMALL)
    assert machine.log == ["start dense", "run dense", "close dense"] * 2


@pytest.mark.parametrize(
    "change",
    [{"kv_bytes": 2 * GIB}, {"options": ("--enforce-eager",)}, {"settings": {"host_gib": 1.0}}, {"row": "plus"}],
)
def test_another_engine_is_another_key(change: dict[str, Any]) -> None:
    assert replace(SMALL, **change).engine_key != SMALL.engine_key
    assert replace(SMALL, concurrency=9).engine_key == SMALL.engine_key
