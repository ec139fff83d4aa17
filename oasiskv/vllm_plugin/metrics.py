"""Counters and gauges, through vLLM's own connector statistics to the log and to ``/metrics``.

Counting never raises: an unknown or missing name is ignored on the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "hits": "Pages that the current queries want and that were resident, over steps, layers and KV heads.",
    "misses": "Pages that the current queries want and that were not resident.",
    "pages_fetched": "Pages copied from the host tier into hot slots.",
    "bytes_fetched": "Bytes copied from the host tier into hot slots.",
    "late_plans": "Swap plans that were not ready when their layer ran again; the swaps happen a step later.",
    "swaps_capped": "Wanted swaps that fetch_cap put off.",
    "pipeline_microseconds": "Time spent scoring and planning, in the background or in the layers.",
    "sparse_steps": "Steps in which at least one request attended to a chosen set.",
    "restored_blocks": "Blocks read back from the host tier instead of being computed again.",
    "resumed_requests": "Preempted requests that went on from their host blocks.",
    "recomputed_requests": "Preempted requests whose KV is computed again.",
    "acknowledged_blocks": "Blocks whose host copy every rank has acknowledged.",
}
GAUGES = {
    "bounded_requests": "Running requests whose middle has left the device.",
    "in_place_requests": "Running requests that attend to a chosen set with their full KV on the device.",
    "dense_requests": "Running requests with dense attention.",
    "host_blocks_used": "Host pool blocks reserved.",
    "host_blocks_total": "Host pool blocks.",
}


@dataclass
class OasisStats(KVConnectorStats):
    """One interval's counts (summed when merged) and gauges (the latest wins)."""

    def reset(self) -> None:
        """Start a new interval."""
        self.data: dict[str, Any] = {}

    def add(self, **counts: int) -> None:
        """Add to counters."""
        for name, value in counts.items():
            self.data[name] = self.data.get(name, 0) + int(value)

    def aggregate(self, other: KVConnectorStats) -> OasisStats:
        """Merge a later interval, another rank or the other half into this one."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's periodic log line shows."""
        return {f"oasis {name}": self.data[name] for name in (*COUNTERS, *GAUGES) if name in self.data}

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


class OasisPromMetrics(KVConnectorPromMetrics):
    """``vllm:oasis_*`` on ``/metrics``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:oasis_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: create_metric_per_engine(
                self._gauge_cls(
                    name=f"vllm:oasis_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
                ),
                per_engine_labelvalues,
            )
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one interval."""
        for name, counter in self._counters.items():
            counter[engine_idx].inc(max(0, transfer_stats_data.get(name, 0)))
        for name, gauge in self._gauges.items():
            if name in transfer_stats_data:
                gauge[engine_idx].set(transfer_stats_data[name])
