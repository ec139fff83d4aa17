"""The blocks that a step attends to are the best ones by the queries of the step before, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, prompt
from torch import Tensor
from verifier import Verifier


class ChoiceChecker(Verifier):
    """Works out, from captured keys and queries, which blocks the next step of a request should see."""

    def __init__(self, worker: Any, predictor: str) -> None:
        super().__init__(worker)
        self.predictor = predictor
        self.wanted: dict[tuple[str, int, int], list[Tensor]] = {}
        self.checked = 0
        self.changed = 0

    def __call__(
        self, layer: int, view: Any, metadata: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        super().__call__(layer, view, metadata, query, key, value, output)
        if self.worker.layout.layers[layer].is_draft:
            return
        common = metadata.common
        starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
        for i in range(common.num_reqs):
            held = self.worker.owner_of(common.block_table_tensor[i].numpy(), lens[i])
            if held is None:
                continue
            wanted = self.wanted.pop((held.request_id, held.born, layer), None)
            if wanted is not None:
                self._compare_sets(self.worker.map.block[layer, held.row, :, : held.hot_count], wanted)
            keys = self.by_request[(held.request_id, held.born, layer)][0]
            newest = starts[i + 1] - 1 - held.drafts
            rows = {
                "both": sorted({newest, newest + held.real_drafts}),
                "lookahead": [newest + held.real_drafts],
                "current": [newest],
            }[self.predictor]
            self.wanted[(held.request_id, held.born, layer)] = self._scores(keys, query[rows], held.first_window)

    def _scores(self, keys: Tensor, queries: Tensor, first_window: int) -> list[Tensor]:
        """For each set: the score of every block, -inf for those that may not be chosen."""
        sinks, heads, dim = self.worker.geometry.sinks, keys.shape[1], keys.shape[2]
        blocks = keys[: first_window * self.size].double().view(first_window, -1, 16, heads, dim)
        low, high = blocks.amin(2), blocks.amax(2)  # [blocks, parts, heads, D]
        q = queries.double().unflatten(1, (heads, -1))  # [rows, heads, group, D]
        box = torch.einsum("rhgd,bphd->hrgbp", q, (low + high) / 2)
        box += torch.einsum("rhgd,bphd->hrgbp", q.abs(), (high - low) / 2) * 0.5
        page = (box * dim**-0.5).logsumexp(-1)  # [heads, rows, group, blocks]
        page[..., :sinks] = float("-inf")
        merged = page.softmax(-1).sum((1, 2))  # [heads, blocks]
        merged[:, 1:] += 0.1 * merged[:, :-1].clone()  # the text goes on in the next block
        if self.worker.map.heads == 1:
            merged = merged.sum(0, keepdim=True)
        return list(merged)

    def _compare_sets(self, chosen: Tensor, wanted: list[Tensor]) -> None:
        for blocks, scores in zip(chosen.long(), wanted, strict=True):
            best = scores.topk(len(blocks))
            least = best.values[-1]
            assert len(set(blocks.tolist())) == len(blocks)
            assert (scores[blocks] >= least * (1 - 1e-4)).all(), (  # float32 may swap two that are as good as equal
                f"step {self.worker.step}: {sorted(blocks.tolist())}, best are {sorted(best.indices.tolist())}"
            )
            self.checked += 1


@pytest.mark.parametrize("granularity", ["head", "layer"])
@pytest.mark.parametrize("residency", ["in_place", "bounded"])
def test_the_best_blocks_are_chosen(tiny_llama: Path, residency: str, granularity: str) -> None:
    with engine(tiny_llama, residency=residency, granularity=granularity, fetch_cap=1) as e:
        check = ChoiceChecker(e.worker, "both")
        e.worker.observer = check
        e.generate([prompt(600 + 53 * i, seed=i) for i in range(3)], max_tokens=60)
        assert check.checked > 500


@pytest.mark.parametrize("predictor", ["both", "lookahead", "current"])
@pytest.mark.parametrize("drafts", ["refused", "accepted"])
def test_the_queries_that_choose_are_those_the_predictor_names(
    steady_llama: Path, tiny_draft: Path, predictor: str, drafts: str
) -> None:
    model = steady_llama if drafts == "accepted" else tiny_draft
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    with engine(steady_llama, vllm={"speculative_config": config}, predictor=predictor, fetch_cap=1) as e:
        check = ChoiceChecker(e.worker, predictor)
        e.worker.observer = check
        e.generate([prompt(600 + 53 * i, seed=i) for i in range(3)], max_tokens=30)
        assert check.checked > 100 and e.drafted > 50
        assert (e.accepted > e.drafted / 2) == (drafts == "accepted")
