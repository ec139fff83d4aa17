"""Summaries and host copies belong to blocks: right for every block that a request could find, however it came about.

After every step, each block in vLLM's prefix cache has the summary of the keys that were written to it, and each block
with a durable host copy has its summary and the bytes of its pages there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Engine, engine, prompt
from verifier import Verifier

from oasiskv.core.summary_store import SummaryStore
from oasiskv.vllm_plugin.metadata import State

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class BlockChecker:
    """Compares stores with the keys that a :class:`Verifier` captured at the layers' inputs."""

    def __init__(self, e: Engine) -> None:
        self.e, self.worker = e, e.worker
        e.verify()
        self.seen: Verifier = e.worker.observer
        self.size = e.worker.geometry.block_size
        self.cached = self.on_host = self.pages = 0

    def __call__(self) -> None:
        pending = {block for block, _ in self.e.half.ledger._released}
        cached = [b.block_id for b in self.e.pool.blocks if b.block_hash is not None and b.block_id not in pending]
        self.cached += len(cached)
        for layer in range(len(self.worker.pages)):
            if layer in self.seen.by_slot and cached:
                store = self.worker.summaries[layer].store
                self._same_summaries(layer, store, cached, self._written(layer, cached), "cached device block")
        for record in self.e.half.ledger.records.values():
            if record.durable:
                self._check_host(record)

    def _check_host(self, record: Any) -> None:
        name = record.request_id
        host = [block.block_id - 1 for block in record.host[: record.durable]]
        assert self.worker.host_blocks[name][: record.durable].tolist() == host
        table = [b.block_id for b in self.e.half.manager.req_to_blocks[name]]
        held = self.worker.held.get(name)
        for layer in range(len(self.worker.pages)):
            if record.state == State.BOUNDED:
                keys = self.seen.by_request[(name, held.born, layer)][0][: record.durable * self.size]
                keys = keys.unflatten(0, (-1, self.size))
            else:
                keys = self._written(layer, table[: record.durable])
            self._same_summaries(layer, self.worker.arena.summaries[layer], host, keys, f"host block of {name}")
        self.on_host += len(host)
        here = [i for i in range(record.durable) if table[i]]  # not the null block
        for layer in range(len(self.worker.pages)):
            pages, heads = self.worker.pages[layer], self.worker.layout.shapes[layer].heads
            back = torch.zeros_like(pages[: len(here) * heads])
            self.worker.arena.load(layer, torch.tensor(host)[here], None, back, torch.arange(len(here)))
            rows = torch.tensor(table)[here].view(-1, 1) * heads + torch.arange(heads)
            assert torch.equal(back, pages[rows.view(-1)]), f"{name}, layer {layer}: a host page differs"
        self.pages += len(here)

    def _written(self, layer: int, blocks: list[int]) -> torch.Tensor:
        slots = torch.tensor(blocks).view(-1, 1) * self.size + torch.arange(self.size)
        return self.seen.by_slot[layer][0][slots]

    def _same_summaries(
        self, layer: int, store: SummaryStore, blocks: list[int], keys: torch.Tensor, what: str
    ) -> None:
        expected = self.worker.scorers[layer].summarise(keys).transpose(0, 1)
        wrong = (store.get(torch.tensor(blocks)) != expected).any(2).any(0)
        assert not wrong.any(), f"layer {layer}, {what} {blocks[int(wrong.nonzero()[0])]}: not the summary of its keys"


def serve(e: Engine, check: BlockChecker) -> None:
    """Two waves over a shared document, with several samples, an abort and requests that finish beside others."""
    document = prompt(330, seed=100)
    for wave in range(2):
        for i in range(3):
            e.submit(document + prompt(40 + 61 * i, seed=i), max_tokens=30 + 7 * i)
        e.submit(document + prompt(77, seed=9), max_tokens=36, n=2, temperature=0.9)
        e.submit(prompt(65, seed=200 + wave), max_tokens=45)
        doomed = e.submit(document + prompt(100, seed=8), max_tokens=90)
        for step in range(20):
            e.step()
            check()
            if step == 15:
                e.abort(doomed)
        while e.llm.llm_engine.has_unfinished_requests():
            e.step()
            check()


@pytest.mark.parametrize("spec", ["alone", "ngram", "draft_model", "draft_itself"])
@pytest.mark.parametrize("residency", ["in_place", "bounded"])
def test_every_block_has_the_summary_of_its_keys(
    steady_llama: Path, tiny_draft: Path, residency: str, spec: str
) -> None:
    draft = {"draft_model": tiny_draft, "draft_itself": steady_llama}.get(spec)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3} if draft else NGRAM
    vllm = {"max_num_batched_tokens": 300} | ({} if spec == "alone" else {"speculative_config": config})
    with engine(steady_llama, vllm=vllm, residency=residency, budget_tokens=160) as e:
        check = BlockChecker(e)
        serve(e, check)
        assert check.cached > 1000 and e.hits > 1000
        if residency == "bounded":
            assert check.on_host > 1000 and check.pages > 300
        assert (spec == "alone") == (e.drafted == 0)
        assert spec != "draft_itself" or e.accepted > 30


def test_only_what_was_computed_densely_enters_the_prefix_cache(tiny_llama: Path) -> None:
    """A block of a sparse step would be a wrong hit for a request that wants the exact one."""
    first = prompt(400, seed=1)
    for residency in ("in_place", "bounded"):
        with engine(tiny_llama, residency=residency, budget_tokens=160, reuse_approximate=False) as e:
            (((answer),),) = e.generate([first], max_tokens=100)
            before = e.hits
            e.generate([first + answer + prompt(20, seed=2)], max_tokens=2)
            assert 0 < e.hits - before <= 400 // 32 * 32
    with engine(tiny_llama, residency="dense", budget_tokens=160) as e:
        (((answer),),) = e.generate([first], max_tokens=100)
        e.generate([first + answer + prompt(20, seed=2)], max_tokens=2)
        assert e.hits == (500 - 1) // 32 * 32
