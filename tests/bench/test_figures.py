"""Figures, worked out by hand from a run of a few steps."""

from __future__ import annotations

import pytest

from oasiskv.bench.figures import figures, usual_step
from oasiskv.bench.job import OASIS, Answer, Run, Sample

SAMPLES = (
    Sample(2.0, 1, 100, 0, ()),
    Sample(1.0, 2, 50, 1, (7,), fetched=100, pipeline=0.1, answering=1, shortest=101),
    Sample(0.5, 2, 0, 2, (7, 5), fetched=300, pipeline=0.2, answering=2, shortest=52, scheduler=0.002),
    Sample(0.7, 2, 0, 2, (7, 5), fetched=200, pipeline=0.1, answering=2, shortest=53, scheduler=0.004),
    Sample(0.1, 1, 0, 1, (5,), answering=1, shortest=103, scheduler=0.09),
    Sample(0.2, 1, 0, 1, (5,), answering=1, shortest=104),
    Sample(0.1, 1, 0, 1, (5,), answering=1, shortest=105),
)
ANSWERS = (Answer("a", 0, 100, 0.0, 2.0, 4.0, 5), Answer("b", 0, 50, 1.0, 4.0, 5.0, 3), Answer("b", 1, 60, 6, 7, 7, 1))
RUN = Run(OASIS, 32, 100, 9.0, 2, SAMPLES, ANSWERS, {"bounded_requests": 2})


def test_throughput_is_over_everything_and_over_steps_that_only_decode() -> None:
    found = figures(RUN)
    assert found.seconds == pytest.approx(4.6)
    assert found.output_tokens == 8
    assert found.throughput == pytest.approx(8 / 4.6)
    assert found.decode_throughput == pytest.approx(7 / 1.6)


def test_the_usual_step_is_the_one_in_which_most_tokens_are_made() -> None:
    assert usual_step(SAMPLES) == (2, pytest.approx(600))  # two steps with 2 tokens beat three with 1
    assert usual_step(SAMPLES[:2]) == (0, 0.0)


def test_the_schedulers_time_is_that_of_the_usual_steps() -> None:
    assert figures(RUN).scheduler_ms == pytest.approx(3)


def test_a_run_that_does_not_know_its_schedulers_time_can_be_read() -> None:
    old = RUN.as_dict()
    for sample in old["samples"]:
        del sample["scheduler"]
    assert figures(Run.from_dict(old)).scheduler_ms == 0.0


def test_a_batch_counts_requests_however_many_tokens_each_gets() -> None:
    drafted = [Sample(1.0, 2, 0, tokens, (5, 5), answering=2) for tokens in (2, 5, 8)]
    assert usual_step(drafted) == (2, pytest.approx(1000))


def test_steps_beyond_the_budget_are_those_in_which_every_context_is_longer() -> None:
    found = figures(RUN, budget=100)
    assert (found.beyond_batch, found.beyond_ms) == (1, pytest.approx(100))
    assert figures(RUN, budget=200).beyond_batch == 0


def test_latencies_are_of_requests() -> None:
    found = figures(RUN)
    assert found.ttft[0] == pytest.approx(2.0)  # 2, 3 and 1 seconds
    assert found.tpot[0] == pytest.approx(0.5)  # (4 - 2) / 4 and (5 - 4) / 2; one token has none


def test_what_is_by_step_counts_steps_in_which_a_request_decodes() -> None:
    found = figures(RUN)
    assert found.fetched_per_step == pytest.approx(600 / 6)
    assert found.pipeline_share == pytest.approx(0.4 / 2.6)


def test_blocks_and_requests_at_once() -> None:
    found = figures(RUN)
    assert (found.running, found.decoding, found.preemptions) == (2, 2, 2)
    assert found.blocks_mean == pytest.approx((7 + 7 + 5 + 7 + 5 + 5 + 5 + 5) / 8)
    assert found.blocks_most == 7


def test_a_run_survives_its_way_from_the_process() -> None:
    assert Run.from_dict(RUN.as_dict()) == RUN


def test_a_run_in_which_nothing_happened_has_figures() -> None:
    assert figures(Run(OASIS, 32, 100, 1.0, 0, (), ())).throughput == 0.0
