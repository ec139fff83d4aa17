"""Links: measured copy rates. Optional packages: what is there, and what for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from oasiskv.doctor.finding import Finding, Level
from oasiskv.doctor.fresh import Answers

OPTIONAL = {
    "nixl": (("nixl", "nixl-cu12", "nixl-cu13"), "pages between machines"),
    "mooncake": (("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"), "a pool of pages shared by machines"),
    "lmcache": (("lmcache",), "comparison with its offloading"),
    "triton": (("triton", "triton-cpu"), "kernels on GPUs"),
    "ray": (("ray",), "workers on several machines"),
    "lm_eval": (("lm_eval",), "quality on public tasks"),
    "plotly": (("plotly",), "charts of measurements"),
    "prometheus_client": (("prometheus_client",), "/metrics"),
}
"""Name, the distributions that bring it, and what it is needed for."""


def link(answers: Answers) -> Finding:
    """How fast bytes move: in memory on a CPU; pinned host memory to GPU, and GPU to GPU. Not yet run on a GPU."""
    facts = answers["copies"]
    if "memory" in facts:
        with_threads = f"{facts['threads']} thread{'s' if facts['threads'] != 1 else ''}"
        return Finding("links", Level.OK, f"copies in memory: {rate(facts['memory'])} with {with_threads}")
    text = f"host to GPU, pinned: {', '.join(map(rate, facts['to_device']))}"
    if facts["pairs"]:
        text += f"; {len(facts['peers'])} of {facts['pairs']} pairs of GPUs reach each other directly"
    return Finding("links", Level.OK, text)


def rate(bytes_per_second: float) -> str:
    """In GB/s (10^9 bytes), as links are sold."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def optional(name: str, version_of: Callable[[str], str] = version) -> Finding:
    """Whether one of :data:`OPTIONAL` is there: never worse than OK."""
    distributions, purpose = OPTIONAL[name]
    for distribution in distributions:
        try:
            return Finding("optional", Level.OK, f"{name} {version_of(distribution)}")
        except PackageNotFoundError:
            continue
    return Finding("optional", Level.OK, f"{name} is not installed (needed for {purpose})")
