"""The compiled kernels (``native/``), where torch would need many passes over memory. Each stands beside a reference
in torch, which runs where they are missing (not compiled at installation, or tensors that are not on a CPU); but for
attention, where vLLM's own kernel does.

They share torch's own threads, and run without the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from ctypes import c_int64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oasiskv.core import native

if TYPE_CHECKING:
    from oasiskv.core.residency import PageMoves
    from oasiskv.core.summary_store import SummaryStore

ISAS = ("any machine", "AVX2", "AVX-512 with bfloat16")
"""Instruction sets that the kernels are compiled for, best last."""
SWITCH = "OASISKV_KERNELS"
"""Environment: 0 leaves everything to torch."""
MOST_DIM = 256
"""Largest head dimension that the kernels take."""
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


OUT_OF_RANGE = "a count, or the index of a block, a row or a token, is out of range"
_TAKES = {
    "oasis_two_bit_scores": native.TwoBitScores,
    "oasis_swap_plans": native.SwapPlans,
    "oasis_copy_rows": native.CopyRows,
    "oasis_copy_blocks": native.CopyBlocks,
    "oasis_enter_swaps": native.EnterSwaps,
}
_OTHERS = ("oasis_best_isa", "oasis_write_summaries", "oasis_decode_attention", "oasis_score_and_swap")
logger = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, if they are built and switched on."""
    found = importlib.util.find_spec("oasiskv.core.native._kernels")
    if found is None or found.origin is None or os.environ.get(SWITCH) == "0":
        return None
    loaded = ctypes.CDLL(found.origin)
    if not native.is_current(loaded):
        logger.warning(
            "OasisKV: the compiled kernels in %s are of another version than the Python beside them, so torch does "
            "their work, more slowly; install OasisKV again (in a clone: pip install --no-deps -e .)",
            found.origin,
        )
        return None
    for name in (*_TAKES, *_OTHERS):
        getattr(loaded, name).restype = c_int64
    return loaded


def _call(name: str, **values: Any) -> None:
    """Call a kernel with such fields."""
    if not getattr(library(), name)(ctypes.byref(filled(_TAKES[name], values))):
        raise IndexError(f"{name}: {OUT_OF_RANGE}")


def filled(structure: type[ctypes.Structure], values: dict[str, Any]) -> ctypes.Structure:
    """A structure with these fields; a tensor stands for its address."""
    given = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in values.items()}
    return structure(**given)


def are_built() -> bool:
    """Whether the kernels are there and switched on."""
    return library() is not None


def best_isa() -> int:
    """Index in ``ISAS`` of the best that this machine has; -1 without kernels."""
    found = library()
    return int(found.oasis_best_isa()) if found is not None else -1


def take(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these tensors."""
    return are_built() and all(tensor.device.type == "cpu" for tensor in tensors)


def two_bit_scores(
    store: SummaryStore,
    box_dtype: torch.dtype,
    queries: Tensor,
    rows: Tensor,
    row_counts: Tensor,
    index: Tensor,
    counts: Tensor,
    *,
    scale: float,
    read_on: float,
    refine: int,
    isa: int | None = None,
) -> Tensor:
    """Shares of mass by page, from two-bit summaries: see :func:`oasiskv.core.page_scores.page_scores`.

    Args:
        store: of ``TwoBitScorer``.
        box_dtype: number format of the outlines.
        queries: float32 or bfloat16 ``[tokens, query heads, D]``, after RoPE.
        rows: int64 ``[R, 2]``: tokens whose queries speak for each request.
        row_counts: bool ``[R, 2]``: whether they do.
        index: int64 ``[R, M]``: block of each candidate.
        counts: int64 ``[R]``: candidates of each request, its first columns.
        scale: the softmax scale.
        read_on: share of a page's mass that is handed to the next one.
        refine: pages per request and KV head whose codes are read.
        isa: index in ``ISAS``; the best if None.

    Returns:
        float32 ``[R, KV heads, M]``; ``-inf`` beyond ``counts``.
    """
    heads = store.bodies.shape[0]
    tokens, query_heads, dim = queries.shape
    assert dim <= MOST_DIM and query_heads % heads == 0 and queries[0].is_contiguous()
    assert index.dtype == rows.dtype == counts.dtype == torch.int64 and row_counts.dtype == torch.bool
    index, counts, rows, row_counts = (t.contiguous() for t in (index, counts, rows, row_counts))
    requests, columns = index.shape
    out = torch.empty(requests, heads, columns)
    _call(
        "oasis_two_bit_scores",
        **summaries(store, box_dtype),
        index=index,
        counts=counts,
        requests=requests,
        columns=columns,
        queries=queries,
        query_format=FORMATS[queries.dtype],
        tokens=tokens,
        token_stride=queries.stride(0),
        rows=rows,
        row_counts=row_counts,
        heads=heads,
        group=query_heads // heads,
        dim=dim,
        scale=scale,
        read_on=read_on,
        refine=refine,
        out=out,
        isa=best_isa() if isa is None else isa,
    )
    return out


def summaries(store: SummaryStore, box_dtype: torch.dtype) -> dict[str, Any]:
    """Where summaries of ``TwoBitScorer`` lie, as fields of a structure."""
    outlines, bodies = store.outlines, store.bodies
    return {
        "outlines": outlines,
        "outline_bytes": outlines.shape[2],
        "bodies": bodies,
        "body_bytes": bodies.shape[2],
        "blocks": bodies.shape[1],
        "box_format": FORMATS[box_dtype],
    }


class TwoBitWrites:
    """One step's share of :meth:`TwoBitLayer.write`, prepared once for all layers. Fields as in ``SummaryWrites``."""

    def __init__(self, **lists: Tensor) -> None:
        self.lists = {name: found.contiguous() for name, found in lists.items()}
        assert all(found.dtype == torch.int64 for found in lists.values())
        counts = {f"{name.split('_')[0]}_count": len(found) for name, found in self.lists.items()}
        self.structure = filled(native.SummaryWrites, {**self.lists, **counts})


class TwoBitLayer:
    """One layer's share of it, prepared once: a step only names its keys. Python between two layers of a model runs on
    cold caches, at ten times its usual cost."""

    def __init__(self, store: SummaryStore, dim: int, key_dtype: torch.dtype, box_dtype: torch.dtype) -> None:
        """``store``: for summaries of ``TwoBitScorer``; ``box_dtype``: number format of the outlines."""
        heads = store.bodies.shape[0]
        assert dim <= MOST_DIM
        self._key_dtype, self._tail = key_dtype, (heads, dim)
        self._structure: Any = filled(
            native.SummaryLayer,
            {
                "format": FORMATS[key_dtype],
                "heads": heads,
                "dim": dim,
                **summaries(store, box_dtype),
            },
        )
        self._kept = store
        found = library()
        assert found is not None
        self._kernel = found.oasis_write_summaries

    def stage(self, stage: Tensor) -> None:
        """The keys of unfinished blocks wait in ``stage`` ``[slots, KV heads, D]`` from now on."""
        assert stage.is_contiguous() and stage.dtype == self._key_dtype and stage.shape[1:] == self._tail
        self._structure.stage, self._structure.slots = stage.data_ptr(), len(stage)

    def write(self, writes: TwoBitWrites, keys: Tensor | None) -> None:
        """Carry out a step with ``keys`` ``[tokens, KV heads, D]`` (None: there are none)."""
        layer = self._structure
        if keys is None:
            layer.keys = None
        else:
            tokens, heads, dim = keys.shape
            stride, head_stride, one = keys.stride()
            if keys.dtype is not self._key_dtype or (heads, dim) != self._tail or (head_stride, one) != (dim, 1):
                raise ValueError(f"keys {list(keys.shape)} of {keys.dtype} with strides {keys.stride()} do not fit")
            layer.keys, layer.tokens, layer.token_stride = keys.data_ptr(), tokens, stride
        if not self._kernel(ctypes.byref(writes.structure), ctypes.byref(layer)):
            raise IndexError(f"oasis_write_summaries: {OUT_OF_RANGE}")


def swap_plans(
    scores: Tensor, resident: Tensor, age: Tensor, hot_of: Tensor, sinks: int, cap: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]:
    """What :func:`oasiskv.core.swap_plan.plan_swaps` decides.

    Args:
        scores: float32 ``[R, heads, M]``.
        resident, age: int32 ``[R, heads, H]``.
        hot_of, cap: int ``[R]``.
        sinks: first candidate block.
        width: most swaps C of any request.

    Returns:
        Incoming blocks and their slots int32 ``[R, heads, C]``, kept slots bool ``[R, heads, H]``, and how many
        selected pages were resident, were missing, and were left out because of the cap.
    """
    requests, heads, columns = scores.shape
    scores, resident, age = scores.contiguous(), resident.contiguous(), age.contiguous()
    hot_of, cap = hot_of.long().contiguous(), cap.long().contiguous()
    assert scores.dtype == torch.float32 and resident.dtype == age.dtype == torch.int32
    incoming = torch.empty(requests, heads, width, dtype=torch.int32)
    target = torch.empty_like(incoming)
    kept = torch.empty(resident.shape, dtype=torch.bool)
    counts = torch.empty(requests, heads, 3, dtype=torch.int64)
    _call(
        "oasis_swap_plans",
        scores=scores,
        requests=requests,
        heads=heads,
        columns=columns,
        resident=resident,
        age=age,
        slots=resident.shape[2],
        hot_of=hot_of,
        sinks=sinks,
        cap=cap,
        width=width,
        incoming=incoming,
        target=target,
        kept=kept,
        counts=counts,
    )
    held, missing, capped = counts.sum((0, 1)).tolist()
    return incoming, target, kept, (held, missing, capped)


def places(moves: PageMoves) -> dict[str, Any]:
    """Where pages lie and go, as fields of a structure."""
    assert moves.host.is_contiguous() and moves.device.is_contiguous()
    assert moves.host.dtype == moves.device.dtype and moves.host.shape[1] == moves.device.shape[1]
    return {
        "host": moves.host,
        "host_rows": len(moves.host),
        "host_stride": moves.host_stride,
        "host_first": moves.host_first,
        "device": moves.device,
        "device_rows": len(moves.device),
        "device_stride": moves.device_stride,
        "row_bytes": moves.host.stride(0) * moves.host.itemsize,
    }


def enter_swaps(
    rows: Tensor,
    incoming: Tensor,
    target: Tensor,
    kept: Tensor,
    block: Tensor,
    age: Tensor,
    step: int,
    moves: PageMoves | None,
) -> None:
    """Carry out plans: copy their pages (``moves`` None: there are none to copy), then enter them in the residency map.

    Args:
        rows: int64 ``[R]``: rows of the map.
        incoming, target: int32 ``[R, heads, C]``; ``kept`` bool ``[R, heads, H]``: of the plans.
        block, age: int32 ``[map rows, heads, H]``: one layer of the map.
        step: the age of what was selected.
    """
    requests, heads, width = incoming.shape
    rows, incoming, target, kept = (t.contiguous() for t in (rows, incoming, target, kept))
    assert rows.dtype == torch.int64 and block.is_contiguous() and age.is_contiguous()
    assert block.shape[1:] == age.shape[1:] == kept.shape[1:]
    copying: dict[str, Any] = {}
    if moves is not None:
        index, hot = moves.index.contiguous(), moves.hot.contiguous()
        assert index.dtype == hot.dtype == torch.int64 and hot.shape == (requests, kept.shape[2])
        copying = {
            "page_heads": moves.page_heads or 0,
            "sinks": moves.sinks,
            "columns": index.shape[1],
            "index": index,
            "hot": hot,
            **places(moves),
        }
    _call(
        "oasis_enter_swaps",
        rows=rows,
        requests=requests,
        heads=heads,
        slots=kept.shape[2],
        width=width,
        incoming=incoming,
        target=target,
        kept=kept,
        block=block,
        age=age,
        map_rows=len(block),
        step=step,
        copies=moves is not None,
        **copying,
    )


def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """Copy rows of ``source`` ``[rows, n]`` to rows of ``target``, which none is twice; rows int64 ``[k]``."""
    if not take(source, target) or source.dtype != target.dtype:
        target.index_copy_(0, target_rows, source.index_select(0, source_rows).to(target.dtype))
        return
    assert source.stride(1) == target.stride(1) == 1 and source.shape[1] == target.shape[1]
    assert source_rows.dtype == target_rows.dtype == torch.int64 and len(source_rows) == len(target_rows)
    source_rows, target_rows = source_rows.contiguous(), target_rows.contiguous()
    _call(
        "oasis_copy_rows",
        source=source,
        source_rows=source_rows,
        source_count=len(source),
        target=target,
        target_rows=target_rows,
        target_count=len(target),
        count=len(source_rows),
        row_bytes=source.shape[1] * source.itemsize,
        source_stride=source.stride(0) * source.itemsize,
        target_stride=target.stride(0) * target.itemsize,
    )


class Planes:
    """Where each run of bytes of a block lies in two memories, for copying whole blocks in one call."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """``pairs`` of tensors ``[blocks, n]`` of the same type and n; the first dimension may be strided."""
        rows = []
        for one, other in pairs:
            assert one.shape[1] == other.shape[1] and one.dtype == other.dtype
            assert one.stride(1) == other.stride(1) == 1
            sides = [(side.data_ptr(), side.stride(0) * side.itemsize) for side in (one, other)]
            rows.append([*sides[0], *sides[1], one.shape[1] * one.itemsize])
        self._pairs = tuple(pairs)  # kept alive
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._blocks = tuple(min((len(pair[side]) for pair in pairs), default=0) for side in (0, 1))

    def copy(self, source: Tensor, target: Tensor, backwards: bool = False) -> None:
        """Copy the blocks ``source`` int64 ``[k]`` of the first memory to the blocks ``target`` of the second
        (``backwards``: from the second to the first)."""
        assert source.dtype == target.dtype == torch.int64 and len(source) == len(target)
        here, there = self._blocks[::-1] if backwards else self._blocks
        _call(
            "oasis_copy_blocks",
            planes=self._rows,
            plane_count=len(self._rows),
            source=source.contiguous(),
            target=target.contiguous(),
            count=len(source),
            source_blocks=here,
            target_blocks=there,
            reversed=backwards,
        )
