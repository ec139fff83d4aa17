"""The stopwatch on an object's methods, with a clock that a test can read."""

from __future__ import annotations

import pytest
from test_drive import Clock

from oasiskv.bench.probe import Stopwatch


class Scheduler:
    """Takes three seconds to schedule, one to update, and fails where it is told to."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def schedule(self, throttled: bool = False) -> str:
        self.clock.now += 3
        if throttled:
            raise RuntimeError("no")
        return "plan"

    def update_from_output(self) -> None:
        self.clock.now += 1

    def free(self) -> None:
        self.clock.now += 50


def test_a_stopwatch_adds_up_the_named_methods_and_starts_again_when_it_is_read() -> None:
    clock = Clock()
    scheduler = Scheduler(clock)
    watch = Stopwatch(scheduler, "schedule", "update_from_output", clock=clock)
    assert scheduler.schedule() == "plan"
    clock.now += 100
    scheduler.update_from_output()
    scheduler.free()
    assert (watch.take(), watch.take()) == (4, 0)


def test_a_call_that_fails_counts_and_its_error_passes() -> None:
    clock = Clock()
    scheduler = Scheduler(clock)
    watch = Stopwatch(scheduler, "schedule", clock=clock)
    with pytest.raises(RuntimeError, match="no"):
        scheduler.schedule(throttled=True)
    assert watch.take() == 3
