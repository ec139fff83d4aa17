"""Choosing in the layer itself, where no job runs in the background: a layer's scores, plans and swaps are one call of
the compiled kernels, and are in force as soon as its attention is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oasiskv.core.page_scores import has_kernel
from oasiskv.core.score_and_swap import SwapBatch, SwapLayer
from oasiskv.core.scorers import TwoBitScorer

if TYPE_CHECKING:
    from oasiskv.vllm_plugin.step import ScoreGroup
    from oasiskv.vllm_plugin.worker import Worker


class DirectSwaps:
    """A worker's layers as the kernels take them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._layers: dict[tuple[int, bool], SwapLayer | None] = {}

    def choose(self, layer: int, groups: list[ScoreGroup], query: Tensor, scale: float) -> bool:
        """Bring the sets of ``groups``, which have one, up to date; False, and nothing done, where that takes a job."""
        found = [self._layer(layer, group.on_host, query, scale) for group in groups]
        if None in found:
            return False
        worker = self._worker
        began = time.perf_counter()
        for group, prepared in zip(groups, found, strict=True):
            assert prepared is not None and not group.seeds
            if group.batch is None:
                group.batch = SwapBatch(
                    group.candidates,
                    worker.map,
                    group.rows,
                    group.hot_of,
                    group.hot,
                    group.cap,
                    group.most,
                    sinks=worker.geometry.sinks,
                    step=worker.step,
                    refine=worker.settings.refined_pages(worker.map.hot, worker.geometry.block_size),
                )
            hits, misses, capped = prepared.choose(group.batch, query)
            if group.on_host:
                worker.count_fetched(layer, misses - capped, None)
            if worker.settings.miss_policy == "drop":
                worker.count_choice(layer, hits, misses, capped)
        worker.pipeline.busy_seconds += time.perf_counter() - began
        return True

    def _layer(self, layer: int, on_host: bool, query: Tensor, scale: float) -> SwapLayer | None:
        key = (layer, on_host)
        if key not in self._layers:
            self._layers[key] = self._prepare(layer, on_host, query, scale)
        return self._layers[key]

    def _prepare(self, layer: int, on_host: bool, query: Tensor, scale: float) -> SwapLayer | None:
        worker = self._worker
        scorer = worker.scorers[layer]
        store = worker.arena.summaries[layer] if on_host else worker.summaries[layer].store
        own_sets = worker.layout.layers[layer].shape.heads == worker.map.heads
        if worker.settings.group_merge != "softmax_sum" or not own_sets or not has_kernel(scorer, store, query):
            return None
        assert isinstance(scorer, TwoBitScorer)
        none, pages = torch.empty(0, dtype=torch.int64), worker.pages[layer]
        moves = worker.arena.moves(layer, none, none, worker.geometry.sinks, pages, True) if on_host else None
        return SwapLayer(layer, scorer, store, query, scale, moves)
