"""Pipelines: one job per layer in flight, results taken once, errors told, nothing left behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from oasiskv.core.pipeline import AsyncPipeline, InlinePipeline, make_pipeline

BOTH = pytest.mark.parametrize("make", [InlinePipeline, AsyncPipeline])
NEVER = 30.0
"""Seconds after which a wait that should end at once has failed."""


@BOTH
def test_a_result_is_taken_once(make: Any) -> None:
    pipeline = make()
    assert not pipeline.busy(3) and pipeline.take(3, wait=True) is None
    pipeline.submit(3, lambda: "plan")
    assert pipeline.busy(3) and not pipeline.busy(4)
    assert pipeline.take(3, wait=True) == "plan"
    assert not pipeline.busy(3) and pipeline.take(3, wait=True) is None
    pipeline.close()


@BOTH
def test_layers_do_not_mix(make: Any) -> None:
    pipeline = make()
    for layer in range(5):
        pipeline.submit(layer, lambda layer=layer: layer * layer)
    assert [pipeline.take(layer, wait=True) for layer in (4, 0, 3, 1, 2)] == [16, 0, 9, 1, 4]
    pipeline.close()


@BOTH
def test_a_second_job_of_a_layer_is_refused_until_the_first_is_taken(make: Any) -> None:
    pipeline = make()
    pipeline.submit(0, lambda: 1)
    with pytest.raises(AssertionError, match="layer 0: its last job was not taken"):
        pipeline.submit(0, lambda: 2)
    assert pipeline.take(0, wait=True) == 1
    pipeline.submit(0, lambda: 2)
    assert pipeline.take(0, wait=True) == 2
    pipeline.close()


def test_a_late_job_is_not_waited_for_unless_asked() -> None:
    pipeline: AsyncPipeline[str] = AsyncPipeline()
    go = threading.Event()
    pipeline.submit(0, lambda: "late" if go.wait(NEVER) else "never")
    assert pipeline.take(0) is None and pipeline.busy(0)
    go.set()
    assert pipeline.take(0, wait=True) == "late"
    pipeline.close()


def test_jobs_run_beside_the_caller_in_their_order() -> None:
    pipeline: AsyncPipeline[int] = AsyncPipeline()
    ran: list[int] = []

    def job(layer: int) -> int:
        ran.append(layer)
        return threading.get_ident()

    for layer in (2, 0, 1):
        pipeline.submit(layer, lambda layer=layer: job(layer))
    threads = {pipeline.take(layer, wait=True) for layer in (0, 1, 2)}
    assert ran == [2, 0, 1]
    assert len(threads) == 1 and threading.get_ident() not in threads
    pipeline.close()


def test_a_job_has_one_core_and_leaves_the_callers_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pipeline: AsyncPipeline[int] = AsyncPipeline()
        pipeline.submit(0, torch.get_num_threads)
        assert pipeline.take(0, wait=True) == 1
        assert torch.get_num_threads() == 2
        pipeline.close()
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_job_is_raised_where_it_is_taken() -> None:
    pipeline: AsyncPipeline[int] = AsyncPipeline()
    pipeline.submit(0, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.take(0, wait=True)
    assert not pipeline.busy(0)
    pipeline.submit(0, lambda: 7)
    assert pipeline.take(0, wait=True) == 7
    pipeline.close()


def test_closing_waits_for_what_runs_and_cancels_what_has_not_begun() -> None:
    pipeline: AsyncPipeline[None] = AsyncPipeline()
    began, go, ended, second = (threading.Event() for _ in range(4))

    def first() -> None:
        began.set()
        go.wait(NEVER)
        ended.set()

    pipeline.submit(0, first)
    pipeline.submit(1, second.set)
    assert began.wait(NEVER)
    threading.Timer(0.05, go.set).start()
    pipeline.close()
    assert ended.is_set() and not second.is_set()
    assert not [t for t in threading.enumerate() if t.name.startswith("oasiskv-pipeline")]
    pipeline.close()


@pytest.mark.parametrize(
    ("mode", "cores", "threads", "expected"),
    [
        ("inline", 8, 1, InlinePipeline),
        ("async", 1, 1, AsyncPipeline),
        ("auto", 2, 2, InlinePipeline),
        ("auto", 3, 2, AsyncPipeline),
    ],
)
def test_auto_is_async_where_a_core_is_free(
    monkeypatch: pytest.MonkeyPatch, mode: str, cores: int, threads: int, expected: type
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    pipeline: Any = make_pipeline(mode)
    assert isinstance(pipeline, expected)
    pipeline.close()
