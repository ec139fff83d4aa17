"""A layer's whole choice in one call of the compiled kernels: scores, swap plans, copies, entries in the residency map.

The same as :func:`oasiskv.core.page_scores.page_scores`, :func:`oasiskv.core.swap_plan.plan_swaps` and
:meth:`oasiskv.core.residency.ResidencyMap.apply` one after another, where all of them have a kernel: between the layers
of a model the Python around those calls takes longer than the kernels do.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from oasiskv.core import kernels, native
from oasiskv.core.merge import READ_ON
from oasiskv.core.page_scores import Candidates, has_kernel, within
from oasiskv.core.residency import PageMoves, ResidencyMap
from oasiskv.core.scorers import TwoBitScorer
from oasiskv.core.summary_store import SummaryStore


class SwapBatch:
    """R requests that choose in a step, prepared once for all layers."""

    def __init__(
        self,
        candidates: Candidates,
        residency: ResidencyMap,
        rows: Tensor,
        hot_of: Tensor,
        hot: Tensor,
        cap: Tensor,
        most: int,
        *,
        sinks: int,
        step: int,
        refine: int | None,
    ) -> None:
        """
        Args:
            rows, hot_of, cap, sinks, step: int64 ``[R]``, or numbers, as for :func:`plan_swaps`; ``most``: largest cap.
            hot: int64 ``[R, H]``: device block of each slot; read where pages move.
            refine: as for :func:`page_scores`.
        """
        requests, columns = candidates.index.shape
        heads, slots = residency.heads, residency.hot
        width = min(most, slots, columns)
        unit = (requests, heads)
        index, counts, speakers = candidates.index, candidates.counts, candidates.rows
        assert all(t.dtype == torch.int64 for t in (index, counts, speakers, rows, hot_of, hot, cap))
        assert candidates.row_counts.dtype == torch.bool and hot.shape == (requests, slots)
        kept: dict[str, Any] = {
            "requests": requests,
            "heads": heads,
            "slots": slots,
            "columns": columns,
            "width": width,
            "sinks": sinks,
            "index": index.contiguous(),
            "rows": rows.contiguous(),
            "hot_of": hot_of.contiguous(),
            "hot": hot.contiguous(),
            "cap": cap.contiguous(),
            "scores": torch.empty(*unit, columns),
            "incoming": torch.empty(*unit, width, dtype=torch.int32),
            "target": torch.empty(*unit, width, dtype=torch.int32),
            "kept": torch.empty(*unit, slots, dtype=torch.bool),
            "resident": torch.empty(*unit, slots, dtype=torch.int32),
            "age": torch.empty(*unit, slots, dtype=torch.int32),
        }
        of_plans = torch.empty(*unit, 3, dtype=torch.int64)
        scoring = {
            "counts": counts.contiguous(),
            "rows": speakers.contiguous(),
            "row_counts": candidates.row_counts.contiguous(),
            "read_on": READ_ON,
            "refine": within(refine, columns),
            "out": kept["scores"],
            "isa": kernels.best_isa(),
        }
        entering = {"block": residency.block, "age": residency.age, "map_rows": residency.capacity, "step": step}

        def part(structure: type[ctypes.Structure], fields: str, more: dict[str, Any]) -> ctypes.Structure:
            return kernels.filled(structure, {**{f: kept[f] for f in fields.split()}, **more})

        plans = "scores requests heads columns resident age slots hot_of sinks cap width incoming target kept"
        enter = "requests heads slots width rows incoming target kept sinks columns index hot"
        self.heads = heads
        self.structure: Any = native.SwapBatch(
            part(native.TwoBitScores, "index requests columns heads", scoring),
            part(native.SwapPlans, plans, {"counts": of_plans}),
            part(native.EnterSwaps, enter, entering),
            kept["resident"].data_ptr(),
            kept["age"].data_ptr(),
        )
        self._kept = (kept, scoring, entering, of_plans)


class SwapLayer:
    """A layer, prepared once: a step only names its batch and its queries."""

    def __init__(
        self,
        layer: int,
        scorer: TwoBitScorer,
        store: SummaryStore,
        queries: Tensor,
        scale: float,
        moves: PageMoves | None,
    ) -> None:
        """
        Args:
            layer: of the residency map.
            scorer, store, queries, scale: as for :func:`page_scores`; of ``queries`` only format and shape count here.
            moves: where the pages lie and go (its ``index`` and ``hot`` are the batch's); None: they stay.
        """
        heads = store.bodies.shape[0]
        assert has_kernel(scorer, store, queries)
        values = {
            "layer": layer,
            **kernels.summaries(store, scorer.dtype),
            "query_format": kernels.FORMATS[queries.dtype],
            "group": queries.shape[1] // heads,
            "dim": queries.shape[2],
            "scale": scale,
        }
        if moves is not None:
            assert moves.page_heads is None
            values |= kernels.places(moves)
        self._structure: Any = kernels.filled(native.SwapLayer, values)
        self._kept = (store, moves)
        self._heads, self._queries = heads, (queries.dtype, queries.shape[1:])
        library = kernels.library()
        assert library is not None
        self._kernel = library.oasis_score_and_swap

    def choose(self, batch: SwapBatch, queries: Tensor) -> tuple[int, int, int]:
        """Bring the sets of the batch's requests up to date, in this layer.

        Returns:
            How many selected pages were resident, were missing, and of these were left out because of the cap.
        """
        layer = self._structure
        if (queries.dtype, queries.shape[1:]) != self._queries or not queries[:1].is_contiguous():
            raise ValueError(f"queries {list(queries.shape)} of {queries.dtype} do not fit: {self._queries}")
        if batch.heads != self._heads:
            raise ValueError(f"a layer of {self._heads} KV heads cannot choose for {batch.heads}")
        layer.queries, layer.tokens, layer.token_stride = queries.data_ptr(), len(queries), queries.stride(0)
        if not self._kernel(ctypes.byref(batch.structure), ctypes.byref(layer)):
            raise IndexError(f"oasis_score_and_swap: {kernels.OUT_OF_RANGE}")
        return layer.hits, layer.misses, layer.capped
