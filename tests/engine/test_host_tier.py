"""The host tier: shared prefixes stored once, restored instead of computed again, forgotten when the cache is reset."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import engine, prompt

from oasiskv.vllm_plugin.metadata import State

POOL = {"num_gpu_blocks_override": 80, "max_model_len": 1536}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def test_a_prefix_that_has_left_the_device_is_restored_from_the_host(tiny_llama: Path) -> None:
    prompts = [prompt(600, seed) for seed in range(3)]
    with engine(tiny_llama, vllm=POOL, host_gib=0.1) as e:
        report = e.verify()
        first = e.generate(prompts, max_tokens=30)
        e.generate([prompt(1400, 100), prompt(1400, 101)], max_tokens=4)  # pushes them out of vLLM's prefix cache
        before = e.counts["restored_blocks"]
        again = e.generate(prompts, max_tokens=30)
        assert e.counts["restored_blocks"] - before == 3 * (600 // 32)
        assert again == first
    assert report.worst["bounded"] < 1e-5


@pytest.mark.parametrize("spec", ["ngram", "draft_model"])
def test_a_drafter_does_not_keep_a_prefix_from_being_found(tiny_llama: Path, tiny_draft: Path, spec: str) -> None:
    drafter = {"method": "draft_model", "model": str(tiny_draft), "num_speculative_tokens": 3}
    vllm = POOL | {"speculative_config": NGRAM if spec == "ngram" else drafter}
    prompts = [prompt(600, seed) for seed in range(2)]
    with engine(tiny_llama, vllm=vllm, host_gib=0.1) as e:
        report = e.verify()
        e.generate(prompts, max_tokens=30)
        e.generate([prompt(1400, 100), prompt(1400, 101)], max_tokens=4)
        e.generate(prompts, max_tokens=30)
        assert e.counts["restored_blocks"] == 2 * (600 // 32)
    assert max(report.worst.values()) < 1e-5


def test_what_was_pushed_out_of_the_host_is_kept_again(tiny_llama: Path) -> None:
    """No hole stays for ever: what is computed again is offered again."""
    with engine(tiny_llama, vllm=POOL) as e:
        each = e.worker.arena.nbytes / e.half.layout.host_blocks
        summaries = e.half.layout.device_summary_bytes
    with engine(
        tiny_llama, vllm=POOL, host_gib=(50 * each + summaries) / (1 << 30)
    ) as e:  # one of the longest requests
        for tokens in (prompt(600), prompt(1400, 100), prompt(600)):
            e.generate([tokens], max_tokens=30)
        assert e.counts["restored_blocks"] < 600 // 32, "the second pushed out the first"
        before = e.counts["restored_blocks"]
        for block in e.pool.blocks:  # off the device, and off it only
            if block.block_hash is not None:
                e.pool.evict_blocks({block.block_id})
        e.generate([prompt(600)], max_tokens=30)
        assert e.counts["restored_blocks"] - before == 600 // 32


@pytest.mark.parametrize("reuse", [True, False])
def test_what_sparse_steps_computed_is_reused_only_where_it_may_be(tiny_llama: Path, reuse: bool) -> None:
    with engine(tiny_llama, vllm=POOL, host_gib=0.1, reuse_approximate=reuse) as e:
        report = e.verify()
        ((answer,),) = e.generate([prompt(600)], max_tokens=80)
        e.generate([prompt(1400, 100), prompt(1400, 101)], max_tokens=4)
        before = e.counts["restored_blocks"]
        e.generate([[*prompt(600), *answer, *prompt(40, 7)]], max_tokens=20)
        blocks = (600 + 80 - 1) // 32 if reuse else 600 // 32
        assert e.counts["restored_blocks"] - before == blocks
    assert report.worst["bounded"] < 1e-5


def test_requests_over_one_document_hold_one_copy_of_it(tiny_llama: Path) -> None:
    document = prompt(640)
    with engine(tiny_llama, host_gib=0.1) as e:
        most = 0
        for seed in range(8):
            e.submit([*document, *prompt(20, 100 + seed)], max_tokens=40)
        while e.llm.llm_engine.has_unfinished_requests():
            e.step()
            most = max(most, e.half.ledger.host_used())
        each = -(-(660 + 40) // 32)  # blocks of one request in its whole life
        assert most <= 640 // 32 + 8 * (each - 640 // 32)


@pytest.mark.parametrize("sharers", [2, 8])
def test_bounding_never_costs_more_device_blocks_than_leaving_be(tiny_llama: Path, sharers: int) -> None:
    """Two that share a long document both leave it; eight of them read it where it is."""
    document = prompt(960)
    most, bounded = {}, {}
    for residency in ("in_place", "bounded"):
        with engine(tiny_llama, residency=residency) as e:
            usable = e.pool.get_num_free_blocks()
            e.generate([document], max_tokens=1)
            for seed in range(sharers):
                e.submit([*document, *prompt(20, 100 + seed)], max_tokens=80)
            held = []
            while e.llm.llm_engine.has_unfinished_requests():
                e.step()
                held.append(usable - e.pool.get_num_free_blocks())
                bounded[residency] = max(bounded.get(residency, 0), e.half.ledger.states[State.BOUNDED])
            most[residency] = sorted(held)[-len(held) // 4]  # most of the time: all are prefilled first
    assert most["bounded"] <= most["in_place"]
    assert bounded["in_place"] == 0 and (bounded["bounded"] == 2) == (sharers == 2)


def test_different_salts_share_nothing(tiny_llama: Path) -> None:
    with engine(tiny_llama, vllm=POOL, host_gib=0.1) as e:
        restored = {}
        for salt in ("one", "two", "one"):
            before = e.counts["restored_blocks"]
            e.llm.generate({"prompt_token_ids": prompt(600), "cache_salt": salt}, use_tqdm=False)
            restored[salt] = e.counts["restored_blocks"] - before
            e.generate([prompt(1400, 100), prompt(1400, 101)], max_tokens=4)
        assert restored == {"one": 600 // 32, "two": 0}


def test_a_reset_makes_the_host_forget(tiny_llama: Path) -> None:
    with engine(tiny_llama, vllm=POOL, host_gib=0.1) as e:
        e.generate([prompt(600)], max_tokens=30)
        assert e.llm.llm_engine.reset_prefix_cache()
        e.generate([prompt(600)], max_tokens=30)
        assert e.counts["restored_blocks"] == 0 and e.hits == 0


@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_a_preempted_request_goes_on_from_the_host(tiny_llama: Path, speculative: dict | None) -> None:
    prompts = [prompt(600 + 17 * seed, seed) for seed in range(3)]
    vllm = {"num_gpu_blocks_override": 130, "max_model_len": 1536}
    if speculative:
        vllm["speculative_config"] = speculative
    with engine(tiny_llama, vllm=vllm, host_gib=0.1) as e:
        report = e.verify()
        undisturbed = e.generate(prompts, max_tokens=80)
        order = random.Random(0)
        for seed, tokens in enumerate(prompts):
            e.submit(tokens, max_tokens=80, name=f"again-{seed}")
        done: dict[str, list[list[int]]] = {}
        while e.llm.llm_engine.has_unfinished_requests():
            for output in e.step():
                done[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
            if e.steps % 9 == 0 and len(e.scheduler.running) > 1:
                e.preempt(order.choice(e.scheduler.running))
        assert e.counts["resumed_requests"] > 3
        if not speculative:  # drafts, and with them the choice of blocks, depend on what else runs
            assert [done[f"again-{seed}"] for seed in range(3)] == undisturbed
    assert report.worst["bounded"] < 1e-5


def test_a_preempted_request_can_be_aborted(tiny_llama: Path) -> None:
    with engine(tiny_llama, host_gib=0.1) as e:
        name = e.submit(prompt(600), max_tokens=200)
        e.submit(prompt(500, 1), max_tokens=30)
        for _ in range(12):
            e.step()
        (victim,) = [r for r in e.scheduler.running if r.num_prompt_tokens == 600]
        e.preempt(victim)
        assert e.half.ledger.parked
        e.abort(name)
        e.run()
