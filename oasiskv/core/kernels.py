"""Compiled inner loops, where torch would need many passes over memory. Each stands beside a reference in the tests.

Numba compiles them at their first call and keeps the result in its cache; they run without the GIL.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, fastmath=True, cache=True)
def code_products(queries: np.ndarray, steps: np.ndarray, packed: np.ndarray, out: np.ndarray) -> None:
    """Products of queries with 2-bit codes: ``out[b,q,n,t] += sum_d queries[b,q,d] steps[b,n,d] code[b,n,t,d]``.

    Args:
        queries: float32 ``[B, Q, D]``.
        steps: float32 ``[B, N, D]``, the size of one code step in each channel of a part.
        packed: uint8 ``[B, N, T / 4, D]``; byte (i, d) holds channel d of tokens i, T/4 + i, ... from its low bits up.
        out: float32 ``[B, Q, N, T]``, added to.
    """
    rows, quarter = packed.shape[1], packed.shape[2]
    dim = queries.shape[2]
    weights = np.empty(dim, dtype=np.float32)
    for b in range(queries.shape[0]):
        for n in range(rows):
            for q in range(queries.shape[1]):
                for d in range(dim):
                    weights[d] = queries[b, q, d] * steps[b, n, d]
                for i in range(quarter):
                    first, second, third, fourth = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                    for d in range(dim):
                        codes, weight = packed[b, n, i, d], weights[d]
                        first += weight * np.float32(codes & 3)
                        second += weight * np.float32((codes >> 2) & 3)
                        third += weight * np.float32((codes >> 4) & 3)
                        fourth += weight * np.float32(codes >> 6)
                    out[b, q, n, i] += first
                    out[b, q, n, quarter + i] += second
                    out[b, q, n, 2 * quarter + i] += third
                    out[b, q, n, 3 * quarter + i] += fourth
