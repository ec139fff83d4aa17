"""What torch and vLLM make of this machine, section by section: the other side of ``fresh``.

Runs in a Python of its own (``python -m oasiskv.doctor.sections [MODEL]``), because importing may kill it, and because
vLLM changes the environment as it configures itself. Prints two lines of JSON for each section: its name as it begins,
so that one in which Python dies is known, and then its facts, or its error, or which failed section it needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from statistics import median
from typing import Any

from pydantic import ValidationError

from oasiskv.vllm_plugin import probe

Facts = dict[str, Any]
COPY_SECONDS = 0.3
COPY_BYTES = 128 << 20


def _torch() -> Facts:
    import torch

    features = {"AVX2": "_is_avx2_supported", "AVX-512": "_is_avx512_supported", "AMX": "_is_amx_tile_supported"}
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "features": [name for name, test in features.items() if getattr(torch.cpu, test, bool)()],
    }


def _copies() -> Facts:
    """Bytes per second of copies: in memory on a CPU; pinned host memory to device, with CUDA.

    The CUDA half has not yet been run on a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8).unbind()
        return {"memory": _copy_rate(lambda: target.copy_(source)), "threads": torch.get_num_threads()}
    pinned = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for device in range(torch.cuda.device_count()):
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{device}")

        def copy(there: Any = there, device: int = device) -> None:
            there.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize(device)

        rates.append(_copy_rate(copy))
    pairs = [(i, j) for i in range(len(rates)) for j in range(len(rates)) if i != j]
    peers = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return {"pinned": pinned.is_pinned(), "to_device": rates, "peers": peers, "pairs": len(pairs)}


def _copy_rate(copy: Callable[[], Any]) -> float:
    """Bytes per second of a copy of ``COPY_BYTES``: the median of ``COPY_SECONDS`` of copies after a first one."""
    copy()
    times = [time.perf_counter()]
    while len(times) < 2 or times[-1] - times[0] < COPY_SECONDS:
        copy()
        times.append(time.perf_counter())
    return COPY_BYTES / median(end - began for began, end in pairwise(times))


def _imported(package: str) -> Facts:
    return {"version": getattr(import_module(package), "__version__", "")}


def _kernels() -> Facts:
    """Call our compiled kernels; which threading layers numba has for the parallel kernels of vLLM."""
    import numba
    import torch

    from oasiskv.core import kernels

    isa = kernels.best_isa()
    if isa >= 0:
        source, target = torch.arange(12).view(4, 3), torch.zeros(2, 3, dtype=torch.int64)
        kernels.copy_rows(source, torch.tensor([3, 1]), target, torch.tensor([0, 1]))
        if target.tolist() != [[9, 10, 11], [3, 4, 5]]:
            raise RuntimeError(f"the compiled kernels are wrong: {target.tolist()} instead of rows 3 and 1")
    layers = []
    for layer, module in {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}.items():
        try:
            import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        layers.append(layer)
    return {"isa": isa, "numba": numba.__version__, "layers": layers, "chosen": numba.config.THREADING_LAYER}


def error_text(error: BaseException) -> str:
    """One line: for pydantic's errors the first message inside, without the frame around it."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def main(model: str | None) -> None:
    """Print every section."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes elsewhere than our lines
    sections: dict[str, tuple[str | None, Callable[[], Facts]]] = {
        "torch": (None, _torch),
        "copies": ("torch", _copies),
        "kernels": (None, _kernels),
        "transformers": ("torch", lambda: _imported("transformers")),
        "vllm": ("transformers", lambda: _imported("vllm")),
        "plugin": ("vllm", probe.plugin),
        "backend": ("vllm", probe.backend),
        "engine": ("plugin", probe.engine),
        "threads": ("engine", probe.threads),
    }
    if model is not None:
        sections["model"] = ("engine", lambda: probe.model(model))
    answered = set()
    for section, (needs, ask) in sections.items():
        line: Facts = {"section": section}
        print(json.dumps(line), file=out, flush=True)
        if needs is not None and needs not in answered:
            line["needs"] = needs
        else:
            try:
                line["facts"] = ask()
                answered.add(section)
            except Exception as error:
                line["error"] = error_text(error)
        print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
