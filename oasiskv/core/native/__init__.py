"""C++ sources of the compiled kernels, and the library that the installation makes of them.

Here is what ``kernels.h`` declares, for ctypes: field for field, in its order.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """``name:kind``, p a pointer, i an int64, f a float."""
    kinds = {"p": c_void_p, "i": c_int64, "f": c_float}
    pairs = [(word.split(":")[0], kinds[word.split(":")[1]]) for word in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


_STORE = "outlines:p outline_bytes:i bodies:p body_bytes:i blocks:i box_format:i"
TwoBitScores = _structure(
    "TwoBitScores",
    f"{_STORE} index:p counts:p requests:i columns:i queries:p query_format:i tokens:i token_stride:i rows:p "
    "row_counts:p heads:i group:i dim:i scale:f read_on:f refine:i out:p isa:i",
)
SwapPlans = _structure(
    "SwapPlans",
    "scores:p requests:i heads:i columns:i resident:p age:p slots:i hot_of:p sinks:i cap:p width:i incoming:p "
    "target:p kept:p counts:p",
)
CopyRows = _structure(
    "CopyRows",
    "source:p source_rows:p source_count:i target:p target_rows:p target_count:i count:i row_bytes:i "
    "source_stride:i target_stride:i",
)
CopyBlocks = _structure(
    "CopyBlocks",
    "planes:p plane_count:i source:p target:p count:i source_blocks:i target_blocks:i reversed:i",
)
EnterSwaps = _structure(
    "EnterSwaps",
    "rows:p requests:i heads:i slots:i width:i incoming:p target:p kept:p block:p age:p map_rows:i step:i copies:i "
    "page_heads:i sinks:i columns:i index:p hot:p host:p host_rows:i host_stride:i host_first:i device:p "
    "device_rows:i device_stride:i row_bytes:i",
)
SummaryWrites = _structure(
    "SummaryWrites",
    "stage_tokens:p stage_slots:p stage_count:i bulk_first:p bulk_blocks:p bulk_count:i staged_rows:p staged_blocks:p "
    "staged_count:i",
)
SummaryLayer = _structure(
    "SummaryLayer",
    f"keys:p tokens:i token_stride:i stage:p slots:i format:i heads:i dim:i {_STORE}",
)
AttentionBatch = _structure("AttentionBatch", "starts:p seq_lens:p table:p requests:i columns:i")
AttentionLayer = _structure(
    "AttentionLayer",
    "cache:p format:i blocks:i heads:i size:i dim:i group:i scale:f query:p out:p tokens:i query_stride:i "
    "out_stride:i isa:i",
)


class SwapBatch(ctypes.Structure):
    """See ``kernels.h``."""

    _fields_ = [
        ("scores", TwoBitScores),
        ("plans", SwapPlans),
        ("enter", EnterSwaps),
        ("resident", c_void_p),
        ("age", c_void_p),
    ]


SwapLayer = _structure(
    "SwapLayer",
    f"layer:i {_STORE} queries:p query_format:i tokens:i token_stride:i group:i dim:i scale:f host:p host_rows:i "
    "host_stride:i host_first:i device:p device_rows:i device_stride:i row_bytes:i hits:i misses:i capped:i",
)

IN_ORDER: tuple[type[ctypes.Structure], ...] = (
    TwoBitScores,
    SwapPlans,
    CopyRows,
    CopyBlocks,
    EnterSwaps,
    SwapBatch,
    SwapLayer,
    SummaryWrites,
    SummaryLayer,
    AttentionBatch,
    AttentionLayer,
)
"""All of them, as ``oasis_layout`` lists their sizes."""


def is_current(library: ctypes.CDLL) -> bool:
    """Whether the library was made of the sources that these structures belong to, as far as sizes can tell."""
    count = len(IN_ORDER) + 1
    try:
        sizes = (c_int64 * count).in_dll(library, "oasis_layout")
    except ValueError:
        return False
    return list(sizes) == [*map(ctypes.sizeof, IN_ORDER), 0]
