"""Nothing of a request remains once it has left, however it left."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Engine, engine, prompt

MIB = 1 << 20


def churn(e: Engine, requests: int, seed: int) -> int:
    """Requests of random length, arrival, budget and samples, every fourth of them aborted. Returns how many were."""
    dice = random.Random(seed)
    running: set[str] = set()
    doomed: dict[str, int] = {}  # steps left
    aborted = sent = 0
    while sent < requests or running:
        if sent < requests and len(running) < 12 and dice.random() < 0.5:
            own: dict[str, Any] = {"n": 2, "temperature": 0.5} if dice.random() < 0.1 else {}
            if dice.random() < 0.3:
                own["extra_args"] = {"oasis_budget_tokens": 128}
            length = int(dice.choice((30, 200, 420, 700)) * dice.uniform(0.5, 1))
            shared = prompt(64, seed=1) if dice.random() < 0.5 else []
            name = e.submit(shared + prompt(length, seed=seed + sent), dice.randrange(1, 60), **own)
            running.add(name)
            if sent % 4 == 0:
                doomed[name] = dice.randrange(0, 25)
            sent += 1
        for name in [n for n, left in doomed.items() if left == 0 and n in running]:
            e.abort(name)  # waiting, prefilling, dense, in place or bounded
            running.discard(name)
            aborted += 1
        doomed = {n: left - 1 for n, left in doomed.items() if left and n in running}
        running -= {output.request_id for output in e.step()}
        if e.steps % 16 == 0:
            e.check_worker()
    return aborted


SPECULATIONS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize(("residency", "spec"), [("auto", "alone"), ("bounded", "draft_model")])
def test_200_requests_leave_nothing(steady_llama: Path, residency: str, spec: str) -> None:
    """In a pool so small that some are preempted. What is left after the second hundred is what was left after the
    first: the arrays that grow with the number of requests at once have grown, nothing grows with their total."""
    config = SPECULATIONS[spec]
    vllm: dict[str, Any] = {"num_gpu_blocks_override": 43, "max_model_len": 900}
    if config:
        vllm["speculative_config"] = config | {"model": str(steady_llama)}
    with engine(steady_llama, vllm=vllm, residency=residency, budget_tokens=192) as e:
        aborted, objects, size = churn_twice(e, 100, seed=1000)
        assert aborted > 20 and len(e.preempted) > 0
        assert e.counts["sparse_steps"] > 100 and e.counts["pages_fetched"] > 100
        assert objects < 100, f"{objects} Python objects more than before"
        assert size < 8 * MIB, f"the process holds {size / MIB:.1f} MiB more than before"


def churn_twice(e: Engine, requests: int, seed: int) -> tuple[int, int, int]:
    """Requests aborted, and what the process holds after the second time more than after the first: objects, bytes."""
    aborted = churn(e, requests, seed)
    e.assert_empty()
    before = held()
    aborted += churn(e, requests, 2 * seed)
    e.assert_empty()
    objects, size = (now - then for now, then in zip(held(), before, strict=True))
    print(f"{aborted} aborted, {len(e.preempted)} preempted, {objects} objects and {size / MIB:.2f} MiB more")
    return aborted, objects, size


def held() -> tuple[int, int]:
    """Python objects and bytes of this process."""
    gc.collect()
    return len(gc.get_objects()), psutil.Process().memory_info().rss


def test_aborting_a_request_that_waits_or_is_unknown_is_nothing(tiny_llama: Path) -> None:
    with engine(tiny_llama, vllm={"max_num_seqs": 1}) as e:
        e.submit(prompt(600), max_tokens=30)
        waits = e.submit(prompt(500, seed=1), max_tokens=30)
        for _ in range(5):
            e.step()
        e.abort(waits)
        e.abort("nobody")
        e.abort(waits)
        assert len(e.run()) == 1


def test_a_request_aborted_in_the_step_in_which_it_becomes_bounded(tiny_llama: Path) -> None:
    """At each of its first steps in turn: seeding, in place, copies on the way, hot slots announced."""
    with engine(tiny_llama) as e:
        for steps in range(1, 7):
            name = e.submit(prompt(600, seed=steps), max_tokens=30)
            for _ in range(steps):
                e.step()
            e.abort(name)
            e.assert_empty()
