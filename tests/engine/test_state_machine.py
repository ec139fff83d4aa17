"""Any order of arrivals, steps, aborts, preemptions, resets and late or lost acknowledgements: nothing breaks.

Hypothesis drives vLLM's real scheduler with our real manager, ledger and connector half (see ``simulated``), and after
every transition all invariants are checked. A failure is printed as the shortest program that shows it.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated import MOST_TOKENS, Simulation

from oasiskv.vllm_plugin.metadata import State

WORDS = [random.Random(0).randrange(5, 400) for _ in range(3000)]


class Life(RuleBasedStateMachine):
    """``model`` is the folder of any small model: only its configuration is read."""

    model: ClassVar[Path]
    total: ClassVar[Counter[str]] = Counter()

    @initialize(
        residency=st.sampled_from(["bounded", "bounded", "auto", "in_place"]),
        host_blocks=st.sampled_from([33, 60, 200]),
        drafts=st.booleans(),
        reuse=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(self, residency: str, host_blocks: int, drafts: bool, reuse: bool, seed: int) -> None:
        """An engine, whose device pool holds two of the longest requests."""
        self.sim = Simulation(self.model, residency, 64, host_blocks, drafts, reuse, seed)

    @rule(
        document=st.integers(0, 2),
        shared=st.sampled_from([0, 64, 300, 500]),
        own=st.integers(1, 200),
        output=st.sampled_from([1, 5, 40, 150]),
        salt=st.sampled_from([None, None, "a", "b"]),
        budget=st.sampled_from([None, None, None, 128]),
    )
    def submit(self, document: int, shared: int, own: int, output: int, salt: str | None, budget: int | None) -> None:
        """A request, perhaps over a document that others have too."""
        if len(self.sim.scheduler.requests) < 10:
            begin = random.Random(own).randrange(2000)
            prompt = WORDS[document : document + shared] + WORDS[begin : begin + own]
            self.sim.submit(prompt, min(output, MOST_TOKENS - len(prompt)), salt, budget)

    @rule(document=st.integers(0, 2), which=st.integers(0, 100))
    def chat_again(self, document: int, which: int) -> None:
        """The next turn of a conversation: a finished request's tokens and some more."""
        ended = [n for n in self.sim.done if n not in self.sim.scheduler.requests and n in self.sim.prompts]
        if ended and len(self.sim.scheduler.requests) < 10:
            name = ended[which % len(ended)]
            prompt = self.sim.prompts[name] + self.sim.done[name] + WORDS[document : document + 20]
            if len(prompt) < MOST_TOKENS - 20:
                self.sim.submit(prompt, 20)

    @rule(steps=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, steps: int) -> None:
        """The engine goes on."""
        step_and_check(self.sim, steps)

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        """A client hangs up, in whatever state its request is."""
        names = list(self.sim.scheduler.requests)
        self.sim.abort(names[which % len(names)])

    @precondition(lambda self: self.sim.scheduler.running)
    @rule(which=st.integers(0, 100))
    def preempt(self, which: int) -> None:
        """A running request gives way; a bounded one if there is one, for those are ours."""
        names = self.bounded() or [r.request_id for r in self.sim.scheduler.running]
        self.sim.preempt(names[which % len(names)])

    @precondition(lambda self: self.bounded())
    @rule(which=st.integers(0, 100), steps=st.sampled_from([1, 3, 10]))
    def preempt_and_go_on(self, which: int, steps: int) -> None:
        """A bounded request gives way, and the engine goes on, perhaps with it."""
        names = self.bounded()
        self.sim.preempt(names[which % len(names)])
        step_and_check(self.sim, steps)

    def bounded(self) -> list[str]:
        """Running requests that are bounded."""
        records = self.sim.half.ledger.records
        running = [r.request_id for r in self.sim.scheduler.running]
        return [name for name in running if records[name].state == State.BOUNDED]

    @rule()
    def hold_acknowledgements(self) -> None:
        """Copies are not acknowledged for a while; those of these steps are never heard of one by one."""
        self.sim.holding_acks = True

    @precondition(lambda self: self.sim.holding_acks)
    @rule()
    def release_acknowledgements(self) -> None:
        """The next acknowledgement covers all that were lost."""
        self.sim.holding_acks = False

    @rule(on=st.booleans())
    def draft(self, on: bool) -> None:
        """The drafter finds something, or nothing, from now on."""
        self.sim.drafting = on and self.sim.scheduler.num_spec_tokens > 0

    @rule(dice=st.integers(0, 3))
    def reset(self, dice: int) -> None:
        """The weights change (not too often)."""
        if dice == 0:
            self.sim.reset()

    @invariant()
    def holds(self) -> None:
        """After every transition."""
        if hasattr(self, "sim"):
            self.total["transitions"] += 1
            self.sim.check()

    def teardown(self) -> None:
        """Whatever was left ends, and nothing remains."""
        if hasattr(self, "sim"):
            self.sim.finish()
            self.total.update(self.sim.counts)


def step_and_check(sim: Simulation, steps: int) -> None:
    """Steps of the engine, each followed by all checks."""
    for _ in range(steps):
        if sim.scheduler.requests:
            sim.step()
            sim.check()


def drive(model: Path, examples: int, transitions: int) -> Counter[str]:
    """Run the machine. Returns what happened."""
    machine = type("AnyLife", (Life,), {"model": model, "total": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    total: Counter[str] = machine.total  # type: ignore[attr-defined]
    print(dict(total))
    assert total["transitions"] >= transitions
    rare = ("BOUNDED", "IN_PLACE", "SEEDED", "parks", "resumes", "loads", "resets", "accepted")
    assert all(total[what] > transitions // 500 for what in rare), "some state hardly ever occurred"
    return total


def test_any_life(tiny_llama: Path) -> None:
    drive(tiny_llama, examples=90, transitions=2_000)


@pytest.mark.slow
def test_very_many_lives(tiny_llama: Path) -> None:
    drive(tiny_llama, examples=3_300, transitions=100_000)


def test_the_simulation_sees_a_block_that_is_reused_too_early(tiny_llama: Path, monkeypatch: Any) -> None:
    """The checks can fail: free the middle without waiting for its copies, and somebody reads another's KV."""
    from oasiskv.vllm_plugin.ledger import Ledger

    def at_once(self: Ledger, record: Any) -> bool:
        return record.has_host and record.geometry.middle(record.committed) > record.geometry.hot

    monkeypatch.setattr(Ledger, "wants_bounded", at_once)
    sim = Simulation(tiny_llama)
    sim.holding_acks = True
    sim.submit(WORDS[:500], 50)
    with pytest.raises(AssertionError, match="without a durable copy"):
        step_and_check(sim, 5)


def test_approximate_blocks_restored_from_the_host_stay_out_of_the_prefix_cache(tiny_llama: Path) -> None:
    """vLLM caches what it is about to load before anyone can tell it that the request computed sparsely."""
    sim = Simulation(tiny_llama, drafts=False)
    sim.submit(WORDS[:316], 40)
    step_and_check(sim, 60)
    sim.submit(sim.prompts["r0"] + sim.done["r0"] + WORDS[:20], 20)
    step_and_check(sim, 1)
    assert sim.counts["loads"] > 0
    sim.finish()


def test_an_acknowledgement_for_a_request_that_left_is_nothing(tiny_llama: Path) -> None:
    sim = Simulation(tiny_llama)
    sim.holding_acks = True
    name = sim.submit(WORDS[:500], 50)
    step_and_check(sim, 3)
    assert sim.half.ledger.records[name].in_flight
    sim.abort(name)
    sim.finish()
    sim.half.ledger.acknowledge(sim.copied_step)
    sim.check()


def test_a_request_that_waits_for_the_host_is_not_starved_by_smaller_ones(tiny_llama: Path) -> None:
    sim = Simulation(tiny_llama, host_blocks=40, drafts=False)
    for i in range(3):
        sim.submit(WORDS[i : i + 300], 40)
    large = sim.submit(WORDS[50:800], 40)
    later = [sim.submit(WORDS[i : i + 290], 40) for i in range(100, 108)]
    order: list[str] = []
    while sim.scheduler.requests:
        step_and_check(sim, 1)
        order += [r.request_id for r in sim.scheduler.running if r.request_id not in order]
        assert sim.counts["steps"] < 2000
    assert order.index(large) < min(order.index(name) for name in later)
    sim.finish()
