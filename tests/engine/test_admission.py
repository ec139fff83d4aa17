"""A bounded request never holds more device blocks than its bound, and that is what lets more of them run at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, engine, prompt

from oasiskv.vllm_plugin.metadata import State

BLOCK, BUDGET, PROMPT, TOKENS = 32, 256, 608, 40
DRAFTS = 3


def most_running(e: Engine, requests: int = 10, lookahead: int = 0, short: bool = True) -> int:
    """Serve equal requests, all waiting from the start; check the bound at every step (``short``: of device blocks)."""
    allowed = -(-BUDGET // BLOCK) + -(-(BLOCK + lookahead) // BLOCK)
    for i in range(requests):
        e.submit(prompt(PROMPT, seed=i), TOKENS)
    most, bounded = 0, 0
    while e.llm.llm_engine.has_unfinished_requests():
        e.step()
        most = max(most, len(e.scheduler.running))
        for name, record in e.half.ledger.records.items() if e.half else ():
            if record.state == State.BOUNDED:
                held = len(e.blocks_of(name))
                assert held <= allowed, f"step {e.steps}: {name} holds {held} blocks, allowed are {allowed}"
                bounded += 1
    if e.half and short:
        assert bounded > requests
    return most


def usable(e: Engine) -> int:
    """Blocks that requests can have: all but the null block and those that hold summaries."""
    return e.pool.get_num_free_blocks()


@pytest.mark.parametrize("pool", [48, 72])
@pytest.mark.parametrize("residency", ["bounded", "auto"])
def test_the_number_running_at_once_is_that_of_the_formula(tiny_llama: Path, residency: str, pool: int) -> None:
    """With prompts of F blocks prefilled here and B blocks for a bounded request: ``floor((P - F) / B) + 1``."""
    vllm = {"num_gpu_blocks_override": pool, "max_model_len": 700}
    full, bound = PROMPT // BLOCK, BUDGET // BLOCK + 1
    with engine(tiny_llama, vllm=vllm, residency=residency, budget_tokens=BUDGET) as e:
        formula = (usable(e) - full) // bound + 1
        most = most_running(e)
        assert abs(most - formula) <= 1, f"{most} ran at once, the formula says {formula}"
        assert e.preempted == []
    with engine(tiny_llama, stock=True, vllm=vllm) as e:
        stock = most_running(e)
    print(f"{residency}, pool of {pool}: {most} at once, formula {formula}, stock {stock}")
    assert stock <= pool // full < most


def test_where_most_are_bounded_nobody_stays_in_place_for_long(tiny_llama: Path) -> None:
    """Beside bounded requests, a few in place would cost every layer a kernel call of their own."""
    vllm = {"num_gpu_blocks_override": 72, "max_model_len": 700}
    alone: Counter[str] = Counter()
    most = 0
    with engine(tiny_llama, vllm=vllm, residency="auto", budget_tokens=BUDGET) as e:
        for i in range(8):
            e.submit(prompt(PROMPT, seed=i), TOKENS)
        while e.llm.llm_engine.has_unfinished_requests():
            e.step()
            ledger = e.half.ledger
            most = max(most, ledger.states[State.BOUNDED])
            if 0 < ledger.states[State.IN_PLACE] < ledger.states[State.BOUNDED]:
                alone.update(name for name, record in ledger.records.items() if record.state == State.IN_PLACE)
    assert most >= 4
    assert max(alone.values()) <= 4, alone  # until its copies are acknowledged


def test_lookahead_slots_are_part_of_the_bound(tiny_llama: Path, tiny_draft: Path) -> None:
    speculation: dict[str, Any] = {"method": "draft_model", "model": str(tiny_draft), "num_speculative_tokens": DRAFTS}
    vllm = {"num_gpu_blocks_override": 72, "max_model_len": 700, "speculative_config": speculation}
    with engine(tiny_llama, vllm=vllm, budget_tokens=BUDGET) as e:
        formula = (usable(e) - PROMPT // BLOCK) // (BUDGET // BLOCK + 2) + 1
        assert abs(most_running(e, lookahead=DRAFTS) - formula) <= 1


def test_requests_with_a_smaller_budget_leave_more_room(tiny_llama: Path) -> None:
    vllm = {"num_gpu_blocks_override": 72, "max_model_len": 700}
    most = []
    for own in (None, 128):
        with engine(tiny_llama, vllm=vllm, budget_tokens=BUDGET) as e:
            for i in range(12):
                extra = {} if own is None else {"extra_args": {"oasis_budget_tokens": own}}
                e.submit(prompt(PROMPT, seed=i), TOKENS, **extra)
            running = 0
            while e.llm.llm_engine.has_unfinished_requests():
                e.step()
                running = max(running, len(e.scheduler.running))
            most.append(running)
    assert most[1] >= most[0] + 3, most


def test_the_host_pool_is_part_of_admission(tiny_llama: Path) -> None:
    """Host blocks for two requests: the third waits although the device would have room, and all get served."""
    each = -(-(PROMPT + TOKENS) // BLOCK)
    with engine(tiny_llama, budget_tokens=BUDGET) as e:
        bytes_per_block = e.worker.arena.nbytes / e.half.layout.host_blocks
        summaries = e.half.layout.device_summary_bytes
    gib = ((2 * each + 5) * bytes_per_block + summaries) / (1 << 30)
    with engine(tiny_llama, vllm={"max_model_len": 700}, budget_tokens=BUDGET, host_gib=gib) as e:
        assert e.half.layout.host_blocks == 2 * each + 5
        assert most_running(e, requests=6) == 2
    with engine(tiny_llama, vllm={"max_model_len": 700}, residency="auto", budget_tokens=BUDGET, host_gib=gib) as e:
        assert most_running(e, requests=6, short=False) == 6, "under `auto` the others stay in place"
