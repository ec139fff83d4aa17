"""Contexts that are filled, not computed: what benchmarks of decoding run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Engine, engine, prompt

FILLED: dict[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "FillConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "oasiskv.vllm_plugin.filled",
    }
}


@pytest.fixture
def filled_oasiskv() -> Iterator[None]:
    """OasisKV's connector, exchanged for the one that fills."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from oasiskv.vllm_plugin import register
    from oasiskv.vllm_plugin.filled import fill_prompts

    register()
    before = dict(KVConnectorFactory._registry)
    fill_prompts()
    yield
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(before)


def prefilled(e: Engine, length: int) -> tuple[int, list[int]]:
    """Prompt tokens that one request has computed after its first step, and its answer."""
    name = e.submit(prompt(length), max_tokens=20)
    computed = 0
    original = e.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        output = original(*args, **kwargs)
        computed = computed or sum(output.num_scheduled_tokens.values())
        return output

    e.scheduler.schedule = schedule
    answer = e.run()[name][0]
    e.scheduler.schedule = original
    return computed, answer


@pytest.mark.usefixtures("filled_oasiskv")
def test_stock_vllm_and_oasiskv_see_the_same_filled_context(tiny_llama: Path) -> None:
    with engine(tiny_llama, stock=True, vllm=FILLED) as e:
        stock = prefilled(e, 615)
    with engine(tiny_llama, residency="dense") as e:
        ours = prefilled(e, 615)
    assert stock == ours
    assert stock[0] == 615 - 4 * 128


@pytest.mark.usefixtures("filled_oasiskv")
def test_a_filled_context_becomes_bounded_and_its_choice_changes(tiny_llama: Path) -> None:
    with engine(tiny_llama, budget_tokens=256) as e:
        names = [e.submit(prompt(600, seed=i), max_tokens=40) for i in range(3)]
        for _ in range(6):
            e.step()
        states = [record.state.name for record in e.half.ledger.records.values()]
        assert states == ["BOUNDED"] * 3
        worker = e.worker
        assert worker is not None
        for name in names:  # every page of the context has a copy, and every copy its summary
            held = e.request_id(name)
            blocks = torch.from_numpy(worker.host_blocks[held])[:16]
            assert len(set(blocks.tolist())) == 16
            assert all(bool(store.get(blocks).any(-1).all()) for store in worker.arena.summaries)
        e.run()
        assert e.counts["pages_fetched"] > 100 and e.counts["misses"] > 100


@pytest.mark.usefixtures("filled_oasiskv")
def test_summaries_are_those_of_the_keys_that_were_drawn(tiny_llama: Path) -> None:
    from oasiskv.vllm_plugin.filled import Bank

    with engine(tiny_llama, residency="in_place") as e:
        name = e.submit(prompt(400), max_tokens=4)
        e.step()
        worker, manager = e.worker, e.half.manager
        assert worker is not None
        blocks = torch.tensor([b.block_id for b in manager.req_to_blocks[e.request_id(name)][:12]])
        layer = next(iter(e.core.vllm_config.compilation_config.static_forward_context.values()))
        bank = Bank(layer.num_kv_heads, layer.head_size, layer.head_size, layer.dtype)
        keys, _ = bank.draw(12 * 32, seed=0)
        expected = worker.scorers[0].summarise(keys.unflatten(0, (12, 32)))
        assert torch.equal(worker.summaries[0].store.get(blocks), expected.transpose(0, 1))
        e.run()
