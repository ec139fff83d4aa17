"""What is asked, in which memory, and what is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oasiskv.bench.cells import BenchError, Cell, Model, make_cell
from oasiskv.bench.job import DENSE, LIMIT, OASIS, PLUS, Job
from oasiskv.bench.process import environment
from oasiskv.bench.workloads import WORKLOADS, Workload, conversations, random_tokens, repetitions, slices
from oasiskv.core.settings import SettingsError

MODEL = Model("small", "/small", token_bytes=1000, context=8192, vocabulary=500)
SOURCE = random_tokens(500)


def cell(workload: Workload, pool_requests: float = 3, **settings: object) -> Cell:
    pool = pool_requests * workload.context * MODEL.token_bytes
    return make_cell(MODEL, workload, 6, 4, dict(settings), pool)


# -- workloads


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_every_workload_has_exactly_its_lengths(workload: Workload) -> None:
    for conversation in conversations(workload, 3, SOURCE):
        assert len(conversation.turns) == workload.turns
        assert len(conversation.turns[0].tokens) == workload.prompt
        assert all(len(turn.tokens) == workload.turn_tokens for turn in conversation.turns[1:])
        assert conversation.length == workload.context


def test_requests_have_different_texts_and_the_same_ones_each_time() -> None:
    first, second = (conversations(WORKLOADS["decode"], 4, random_tokens(500)) for _ in range(2))
    assert first == second
    assert len({c.turns[0].tokens for c in first}) == 4


def test_slices_are_spread_over_the_text_and_start_over_at_its_end() -> None:
    source = slices(range(100), requests=4)
    assert list(source(1, 3)) == [25, 26, 27]
    assert list(source(3, 30))[23:27] == [98, 99, 0, 1]


def test_repetitions_are_a_short_piece_over_and_over_another_one_for_each_request() -> None:
    source = repetitions(range(1_000), requests=4)
    assert list(source(0, 200)) == [*range(64), *range(64), *range(64), *range(8)]
    assert list(source(1, 65)) == [*range(250, 314), 250]


# -- jobs


def test_rows_have_the_same_pool_and_prompts_and_differ_in_oasiskv() -> None:
    c = cell(WORKLOADS["long-context"], budget_tokens=1024)
    dense, oasis, plus = (c.job(row, MODEL, SOURCE) for row in (DENSE, OASIS, PLUS))
    assert dense.kv_bytes == oasis.kv_bytes == c.pool_bytes
    assert plus.kv_bytes == c.pool_bytes + c.host_bytes
    assert dense.settings is None and plus.settings is None
    assert oasis.settings == {"budget_tokens": 1024, "host_gib": c.host_bytes / 2**30}
    assert dense.conversations == oasis.conversations == plus.conversations
    assert dense.engine == oasis.engine


def test_the_pool_is_whole_blocks_of_either_size() -> None:
    assert cell(WORKLOADS["long-context"], pool_requests=2.5).pool_bytes % (128 * MODEL.token_bytes) == 0


def test_the_limit_runs_oasiskvs_batch_on_contexts_as_long_as_the_budget() -> None:
    limit = cell(WORKLOADS["long-context"], budget_tokens=1024).job(LIMIT, MODEL, SOURCE, batch=5)
    assert len(limit.conversations) == limit.concurrency == 5
    assert {len(c.turns[0].tokens) for c in limit.conversations} == {1024}
    assert limit.fill and limit.settings is None
    assert limit.kv_bytes >= 5 * limit.max_model_len * MODEL.token_bytes


def test_a_job_survives_its_way_to_the_process() -> None:
    job = replace(cell(WORKLOADS["multi-turn"]).job(OASIS, MODEL, SOURCE), options=("--enforce-eager",))
    assert Job.from_json(job.to_json()) == job


def test_the_job_says_how_large_the_pool_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(cell(WORKLOADS["decode"]).job(DENSE, MODEL, SOURCE))


def test_there_is_a_limit_only_where_contexts_outgrow_the_budget_and_the_model_reaches_it() -> None:
    assert cell(WORKLOADS["long-context"], budget_tokens=1024).has_limit(MODEL)
    assert not cell(WORKLOADS["long-context"], budget_tokens=8000).has_limit(MODEL)
    assert not cell(replace(WORKLOADS["long-context"], prompt=9000), budget_tokens=8192).has_limit(MODEL)


def test_stock_vllm_does_not_load_the_plug_in() -> None:
    c = cell(WORKLOADS["decode"])
    assert environment(c.job(DENSE, MODEL, SOURCE))["VLLM_PLUGINS"] == ""
    assert environment(c.job(OASIS, MODEL, SOURCE)).get("VLLM_PLUGINS") != ""


# -- refusals


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(BenchError, match=r"8,628 tokens, small has 8,192.*shorter --prompt"):
        cell(replace(WORKLOADS["long-context"], prompt=8500)).check(MODEL)


def test_a_filled_context_may_be_stretched() -> None:
    c = cell(replace(WORKLOADS["decode"], prompt=20_000))
    with pytest.raises(BenchError, match="--stretch"):
        c.check(MODEL)
    stretched = replace(c, stretch=True)
    stretched.check(MODEL)
    assert stretched.job(DENSE, MODEL, SOURCE).engine["hf_overrides"]["max_position_embeddings"] >= 20_128


def test_a_pool_too_small_for_one_request_is_refused_with_what_is_needed() -> None:
    with pytest.raises(BenchError, match=r"KV pool of .* cannot hold one request of 6,128 tokens .*--pool-requests"):
        cell(WORKLOADS["long-context"], pool_requests=1).check(MODEL)


def test_a_budget_without_a_hot_slot_is_refused() -> None:
    with pytest.raises(SettingsError, match="no room for hot slots"):
        cell(WORKLOADS["long-context"], budget_tokens=64).check(MODEL)


def test_a_pool_beyond_the_machines_memory_is_refused() -> None:
    with pytest.raises(BenchError, match="are more than the"):
        cell(WORKLOADS["long-context"], pool_requests=1e9).check(MODEL)
