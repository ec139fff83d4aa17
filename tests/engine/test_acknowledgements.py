"""A device block is freed only when every rank has its durable copy, and nobody waits for that for ever."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, engine, prompt

from oasiskv.vllm_plugin.metadata import State


def delay_acknowledgements(e: Engine, steps: int) -> None:
    """Have the scheduler hear of every copy ``steps`` steps late."""
    ledger, heard = e.half.ledger, e.half.ledger.acknowledge
    late: deque[int] = deque()

    def acknowledge(step: int) -> None:
        late.append(step)
        if len(late) > steps:
            heard(late.popleft())

    ledger.acknowledge = acknowledge  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [1, 4])
def test_a_request_becomes_bounded_when_its_copies_are_acknowledged(tiny_llama: Path, verified: Any, late: int) -> None:
    with engine(tiny_llama) as e:
        delay_acknowledgements(e, late)
        report = e.verify()
        e.submit(prompt(700), max_tokens=350)
        waited = 0
        while e.llm.llm_engine.has_unfinished_requests():
            e.step()
            for name, record in e.half.ledger.records.items():
                missing = [i for i, b in enumerate(e.half.manager.req_to_blocks[name]) if b.is_null]
                assert all(i < record.durable for i in missing), "freed without a durable copy"
                waited += record.state == State.IN_PLACE
        assert waited >= late
        verified(report)
        assert report.rows["bounded"] > 1000 - 3 * late and max(report.worst.values()) < 1e-5


@pytest.mark.parametrize("residency", ["bounded", "auto"])
def test_acknowledgements_that_never_come_end_in_preemption_not_in_waiting(tiny_llama: Path, residency: str) -> None:
    """Nothing can be freed: the requests take turns, as they do without OasisKV, and all get their tokens."""
    vllm = {"num_gpu_blocks_override": 54, "max_model_len": 1024}
    with engine(tiny_llama, vllm=vllm, residency=residency) as e:
        delay_acknowledgements(e, 10**9)
        for i in range(4):
            e.submit(prompt(480, seed=i), max_tokens=120)
        tokens: list[int] = []
        while e.llm.llm_engine.has_unfinished_requests():
            tokens += [len(output.outputs[0].token_ids) for output in e.step()]
            assert e.steps < 1500, "no progress"
            assert not any(r.state == State.BOUNDED for r in e.half.ledger.records.values())
        assert tokens == [120] * 4
        assert e.preempted
