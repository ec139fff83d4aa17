"""Counting never raises, and nothing is counted twice or lost on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from oasiskv.vllm_plugin.metrics import COUNTERS, GAUGES, OasisPromMetrics, OasisStats


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = prometheus_client.CollectorRegistry()
    kinds = {}
    for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram):
        kinds[kind] = lambda *args, _kind=kind, **kwargs: _kind(*args, registry=registry, **kwargs)
    made = OasisPromMetrics(
        SimpleNamespace(kv_transfer_config={}), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    return made, lambda name, engine: registry.get_sample_value(name, {"model_name": "m", "engine": str(engine)})


def test_counts_add_up_and_the_latest_gauge_wins() -> None:
    first, second = OasisStats(), OasisStats()
    first.add(hits=3, misses=1)
    first.data["bounded_requests"] = 5
    second.add(hits=4)
    second.data["bounded_requests"] = 2
    assert first.aggregate(second).data == {"hits": 7, "misses": 1, "bounded_requests": 2}
    assert first.reduce() == {"oasis hits": 7, "oasis misses": 1, "oasis bounded_requests": 2}
    assert not first.is_empty()
    first.reset()
    assert first.is_empty()


def test_every_engine_has_its_own_counters(metrics: Any) -> None:
    made, value = metrics
    made.observe({"hits": 3, "bounded_requests": 2}, engine_idx=0)
    made.observe({"hits": 4, "bounded_requests": 1}, engine_idx=1)
    made.observe({"hits": 1}, engine_idx=0)
    assert (value("vllm:oasis_hits_total", 0), value("vllm:oasis_hits_total", 1)) == (4, 4)
    assert (value("vllm:oasis_bounded_requests", 0), value("vllm:oasis_bounded_requests", 1)) == (2, 1)


def test_what_is_missing_unknown_or_negative_is_no_error(metrics: Any) -> None:
    made, value = metrics
    made.observe({}, engine_idx=0)
    made.observe({"of_a_later_version": 1, "hits": -5}, engine_idx=0)
    assert all(value(f"vllm:oasis_{name}_total", 0) == 0 for name in COUNTERS)
    assert all(value(f"vllm:oasis_{name}", 0) == 0 for name in GAUGES)
