"""Faults of vLLM 0.32 that we met, mended in this process only and only where OasisKV is switched on."""

from __future__ import annotations

import functools
import sys
from typing import Any

from vllm.triton_utils import dispatcher


def let_engines_follow_numba() -> None:
    """A second CPU engine in one process does not start once numba has compiled something; let it start.

    vLLM looks for copies of its kernels in every loaded module and stumbles over an object of llvmlite (of numba)
    that answers to every name: "'_lib_fn_wrapper' object has no attribute 'get'". No kernel of vLLM is in there, so
    llvmlite is kept out of the search.
    """
    original = dispatcher._rebind_kernels
    if getattr(original, "_oasiskv", False):
        return

    @functools.wraps(original)
    def rebind(*args: Any, **kwargs: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
        try:
            original(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    rebind._oasiskv = True  # type: ignore[attr-defined]
    dispatcher._rebind_kernels = rebind
