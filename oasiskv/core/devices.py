"""Devices as a plan sees them: memory, four rates, and what a step costs besides.

Data-sheet numbers are peaks. ``attained`` is the share of the two bandwidths and of the arithmetic that long-running
kernels and copies reach; 0.8 is an assumption for all GPUs alike (public copy benchmarks reach 52 to 55 of PCIe 5.0's
64 GB/s and 25 of PCIe 4.0's 32), and 1 for what was measured. Everything can be given as a number instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from oasiskv.core.settings import SettingsError

GB, GIB, TERA = 10**9, 1 << 30, 10**12


@dataclass(frozen=True)
class Device:
    """One device, or several that work as one.

    Args:
        memory_bytes: device memory.
        memory_bandwidth: bytes per second, for weights; for KV and summaries too, unless given below.
        flops: dense bfloat16 FLOP per second.
        link_bandwidth: bytes per second from host to device, one direction.
        overhead: seconds of a step that are not the model's arithmetic: scheduling, launches, sampling.
        attained: share of the rates above that is reached.
        kv_bandwidth, summary_bandwidth: rates of the attention kernel and of the scorer, where they are known to be
            bound by something else than memory (0: they read at ``memory_bandwidth``).
        shared_memory: host and device memory are the same: copies add to a step instead of overlapping it.
        stock_block, oasis_block: block sizes in tokens that vLLM and OasisKV choose.
        utilization: share of the memory that vLLM takes.
        reserve_bytes: of that share, what is neither weights nor KV: activations, graphs, the runtime.
        source: where the numbers are from.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    link_bandwidth: float
    overhead: float
    attained: float = 0.8
    kv_bandwidth: float = 0.0
    summary_bandwidth: float = 0.0
    shared_memory: bool = False
    stock_block: int = 16
    oasis_block: int = 16
    utilization: float = 0.92
    reserve_bytes: int = 4 * GIB
    source: str = ""

    def with_numbers(self, **numbers: Any) -> Device:
        """A copy with those of ``numbers`` that are not None. A new ``memory_bandwidth`` replaces the KV's rate too.

        Raises:
            SettingsError: a number is not allowed.
        """
        given = {name: value for name, value in numbers.items() if value is not None}
        for name, value in given.items():
            least = "0 or more" if name == "overhead" else "above 0"
            if value < 0 or (value == 0 and name != "overhead"):
                raise SettingsError(f"{name}={value:g} of the device is not allowed: it must be {least}")
            if name in ("attained", "utilization") and value > 1:
                raise SettingsError(f"{name}={value:g} of the device is not allowed: it is a share, at most 1")
        if "memory_bandwidth" in given:
            given = {"kv_bandwidth": 0.0, "summary_bandwidth": 0.0, **given}
        return replace(self, **given)

    def times(self, count: int) -> Device:
        """``count`` devices with tensor parallelism, each with a link of its own; their exchange costs nothing here."""
        if count == 1:
            return self
        scaled = ("memory_bytes", "memory_bandwidth", "flops", "link_bandwidth", "kv_bandwidth", "summary_bandwidth")
        numbers = {name: getattr(self, name) * count for name in (*scaled, "reserve_bytes")}
        return replace(self, name=f"{count} x {self.name}", **numbers)

    def pool_bytes(self, weights: int) -> int:
        """KV memory that is left beside ``weights`` bytes (may be negative)."""
        return int(self.memory_bytes * self.utilization) - weights - self.reserve_bytes


def _gpu(name: str, memory: int, bandwidth: float, tflops: float, link: int, source: str) -> Device:
    return Device(name, memory * GB, bandwidth * TERA, tflops * TERA, link * GB, overhead=2e-3, source=source)


PRESETS: dict[str, Device] = {
    "h100": _gpu("H100 SXM", 80, 3.35, 989, 64, "NVIDIA H100 data sheet (SXM; 1,979 TFLOP/s sparse); PCIe 5.0 x16"),
    "h200": _gpu("H200 SXM", 141, 4.8, 989, 64, "NVIDIA H200 data sheet (SXM; 1,979 TFLOP/s sparse); PCIe 5.0 x16"),
    "b200": _gpu("B200", 180, 8.0, 2250, 64, "NVIDIA DGX B200 data sheet, an eighth of it; hosts have PCIe 5.0 x16"),
    "a100": _gpu("A100 SXM 80GB", 80, 2.039, 312, 32, "NVIDIA A100 80GB data sheet (SXM); PCIe 4.0 x16"),
    "l40s": _gpu("L40S", 48, 0.864, 362, 32, "NVIDIA L40S data sheet (733 TFLOP/s sparse); PCIe 4.0 x16"),
    "cpu": Device(
        name="CPU, 2 cores",
        memory_bytes=16 * GIB,
        memory_bandwidth=18 * GB,
        flops=0.3 * TERA,
        link_bandwidth=5 * GB,
        overhead=3e-3,
        attained=1.0,
        kv_bandwidth=6 * GB,
        summary_bandwidth=6 * GB,
        shared_memory=True,
        stock_block=128,
        oasis_block=32,
        reserve_bytes=1 * GIB,
        source="measured on two cores of a server with AVX-512 and bfloat16, rounded; KV as vLLM's kernel reads it",
    ),
}
"""Bytes are decimal as in data sheets. GPU overhead (2 ms) and reserve (4 GiB): assumptions, vLLM with CUDA graphs."""


def preset(name: str) -> Device:
    """The preset called ``name``.

    Raises:
        SettingsError: there is none.
    """
    if name.lower() not in PRESETS:
        raise SettingsError(
            f"device={name!r} is not known: use here (this machine, measured), {', '.join(PRESETS)}, or give numbers: "
            "--memory-gib --bandwidth-gbs --tflops --link-gbs"
        )
    return PRESETS[name.lower()]
