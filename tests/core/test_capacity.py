"""A plan's arithmetic, worked out on paper for two models; and what must hold for every load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.capacity import SummaryBytes, Workload, hold_dense, hold_oasis
from oasiskv.core.devices import GB, GIB, PRESETS, TERA, Device, preset
from oasiskv.core.model_shape import read_shape
from oasiskv.core.plan import Case, make_fleet, make_plan, reasons
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.core.step_time import prefill_seconds

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
ROUND = Device("round numbers", 80 * GB, 1 * TERA, 1000 * TERA, 50 * GB, overhead=1e-3, attained=1.0)
"""1 TB/s, 10^15 FLOP/s, a link of 50 GB/s, 1 ms a step."""
ROUND_CPU = Device(
    name="round CPU",
    memory_bytes=16 * GB,
    memory_bandwidth=20 * GB,
    flops=0.3 * TERA,
    link_bandwidth=10 * GB,
    overhead=3e-3,
    attained=1.0,
    kv_bandwidth=5 * GB,
    summary_bandwidth=1 * GB,
    shared_memory=True,
    stock_block=128,
    oasis_block=32,
)


def llama(concurrency: int | None = 100, host_bytes: int | None = 10**12, **settings: object) -> Case:
    """32,000 + 1,000 tokens in a KV pool of 40 GiB; box summaries: 2 x 128 numbers of 2 bytes."""
    shape, load = read_shape("llama", LLAMA_8B), Workload(32_000, 1_000, concurrency)
    chosen = Settings.parse({"scorer": "box", **settings})
    return Case(shape, ROUND, load, chosen, SummaryBytes(512), 40 * GIB, 16, 16, host_bytes)


def smollm2() -> Case:
    """The demo: 5,800 + 64 tokens, a pool of 17,280 tokens; q2 summaries: an outline of 256 bytes, 2 x (128 + 256)."""
    shape, load = read_shape("smollm2", SMOLLM2_135M), Workload(5_800, 64, 8)
    return Case(shape, ROUND_CPU, load, Settings(), SummaryBytes(1_024, 256), 17_280 * 23_040, 128, 32, 10**9)


# --- the model, by hand


def test_parameters_of_llama_8b() -> None:
    shape = read_shape("llama", LLAMA_8B)
    # attention: 32 layers x 4096 x 128 x (2 x 32 + 2 x 8) = 1,342,177,280; MLP: 32 x 3 x 4096 x 14336 = 5,637,144,576;
    # output matrix: 128256 x 4096 = 525,336,576; the embedding table is as large again.
    assert shape.resident_params == 1_342_177_280 + 5_637_144_576 + 525_336_576
    assert shape.embedding_params == 525_336_576
    assert shape.params == 8_030_261_248 - 65 * 4096  # the published number, less its 65 norms
    assert shape.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072


def test_parameters_of_smollm2() -> None:
    shape = read_shape("smollm2", SMOLLM2_135M)
    # 30 x 576 x 64 x (18 + 6) = 26,542,080; 30 x 3 x 576 x 1536 = 79,626,240; one table: 49152 x 576 = 28,311,552.
    assert shape.params == shape.resident_params == 26_542_080 + 79_626_240 + 28_311_552 == 134_515_008 - 61 * 576
    assert shape.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040


def test_a_mixture_of_experts_reads_those_that_are_hit() -> None:
    mixtral = {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = read_shape("mixtral", mixtral)
    assert shape.params == 46_702_792_704 - 65 * 4096  # published
    # attention + routers (32 x 4096 x 8) + output matrix + a quarter of the experts' 45,097,156,608
    assert shape.active_params == 1_342_177_280 + 1_048_576 + 131_072_000 + 11_274_289_152
    assert shape.read_bytes(1) == 2 * shape.active_params
    assert shape.read_bytes(2) == 2 * (shape.resident_params + shape.expert_params * (1 - 0.75**2))
    assert shape.read_bytes(1000) == pytest.approx(2 * (shape.params - shape.embedding_params))


def test_experts_of_their_own_width_and_quantised_weights() -> None:
    config = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    config |= {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "intermediate_size": 6144}
    config |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
    shape = read_shape("qwen3-30b-a3b", config, weight_bits=4, kv_item_bytes=1)
    assert shape.params == pytest.approx(30_532_122_624, rel=1e-4)  # published
    assert shape.held_bytes == shape.params // 2
    assert shape.kv_bytes_per_token == 2 * 48 * 4 * 128


def test_sliding_layers_keep_their_window_and_no_more() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = {**LLAMA_8B, "layer_types": kinds * 8, "sliding_window": 1024}
    shape = read_shape("mixed", config)
    assert (shape.layers, shape.sliding_layers) == (8, 24)
    assert shape.kv_bytes_per_token == 131_072 // 4
    assert shape.sliding_bytes(100_000) == 24 * 8 * 2 * 1024 * 128 * 2  # 24 layers, 8 heads, K and V
    assert shape.sliding_bytes(10) == 24 * 8 * 2 * 10 * 128 * 2
    pattern = {**LLAMA_8B, "model_type": "gemma3_text", "sliding_window": 1024}
    assert read_shape("gemma", pattern).layers == 5  # 6, 12, ... 30
    assert read_shape("qwen", {**LLAMA_8B, "sliding_window": 1024, "use_sliding_window": False}).layers == 32


@pytest.mark.parametrize(
    ("said", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ],
)
def test_quantised_weights_are_seen(said: dict[str, object] | None, bits: float) -> None:
    assert read_shape("m", {**LLAMA_8B, "quantization_config": said}).weight_bytes == bits / 8
    assert read_shape("m", {**LLAMA_8B, "quantization_config": said}, weight_bits=5).weight_bytes == 5 / 8


def test_quantised_weights_of_unknown_size_are_refused() -> None:
    with pytest.raises(SettingsError, match="give --weight-bits"):
        read_shape("m", {**LLAMA_8B, "quantization_config": {"quant_method": "new"}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"alibi": True}, "ALiBi"),
        ({"num_kv_shared_layers": 4}, "shared across layers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"sliding_window": 4096}, "no full-attention layer"),
        ({"hidden_size": None}, "hidden_size=None"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_with_the_reason(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_shape("m", {**LLAMA_8B, **fields})


def test_yarn_stretches_the_context() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_shape("m", {**LLAMA_8B, "rope_scaling": scaled}).max_context == 131_072


# --- memory, by hand


def test_what_llama_holds_and_how_many_fit() -> None:
    plan = make_plan(llama())
    dense, oasis = plan.dense.holding, plan.oasis.holding
    # 40 GiB are 20,480 blocks of 16 tokens x 128 KiB; one is vLLM's empty block. 33,000 tokens take 2,063.
    assert (dense.pool_blocks, dense.held_blocks, dense.held_bytes) == (20_479, 2_063, 2_063 * 2_097_152)
    assert dense.fits == dense.fits_elsewhere == 9  # 9.93
    # A page (8,192 bytes) has one part of 512: a sixteenth of the pool, 1,280 blocks. Budget 128 blocks, and the tail.
    assert (oasis.pool_blocks, oasis.summary_blocks, oasis.held_blocks) == (19_199, 1_280, 129)
    assert oasis.fits == 134  # (19,199 - 2,000) / 129 = 133.3, and the one being prefilled
    assert oasis.fits_elsewhere == 148  # 148.8
    assert oasis.host_bytes_each == 2_063 * (2_097_152 + 131_072)  # pages and summaries
    assert oasis.fits_host == 217  # 10^12 / 4.597 x 10^9
    assert plan.oasis.running == 100 and plan.dense.running == 9


def test_what_the_demo_holds() -> None:
    plan = make_plan(smollm2())
    assert plan.dense.running == 2  # 134 blocks of 128 by 46
    assert plan.oasis.holding.summary_blocks == 0  # they lie beside the host pool
    assert plan.oasis.running == 6  # (539 - 182) / 65 + 1 = 6.5: what ran in the demo
    assert plan.oasis.holding.fits_elsewhere == 8  # 8.3
    assert plan.pooled is not None
    assert plan.pooled.running == 8  # (17,280 x 23,040 + 10^9) bytes are 474 blocks of 128; 473 / 46 = 10, 8 asked for


def test_where_memory_is_shared_the_host_pool_holds_the_summaries_of_the_kv_pool() -> None:
    case = smollm2()
    load, beside = Workload(5_800, 64, 8), 540 * 1_024 * 90  # blocks, bytes, layers and heads
    sizes = (case.summary, case.pool_bytes, 32)
    apart = hold_oasis(case.shape, load, case.settings, *sizes, 10**9)
    shared = hold_oasis(case.shape, load, case.settings, *sizes, 10**9, shared_memory=True)
    assert (apart.summary_blocks, apart.pool_blocks) == (68, 471)  # an eighth of 540, rounded up
    assert (shared.summary_blocks, shared.pool_blocks) == (0, 539)
    assert shared.fits_host == (10**9 - beside) // shared.host_bytes_each
    with pytest.raises(SettingsError, match=rf"--host-gib {(shared.host_bytes_each + beside) / GIB:.3f} or more"):
        hold_oasis(case.shape, load, case.settings.model_copy(update={"residency": "bounded"}), *sizes, 10**7, True)
    alone = case.settings.model_copy(update={"residency": "in_place"})  # without a host pool
    assert hold_oasis(case.shape, load, alone, *sizes, 10**9, shared_memory=True).summary_blocks == 68


def test_the_host_pool_by_default_is_four_kv_pools_and_limits_what_runs() -> None:
    plan = make_plan(llama(host_bytes=None))
    assert plan.case.host_pool == 160 * GIB
    assert plan.oasis.running == 37  # 171.8 / 4.597
    assert any("--host-gib 428" in sentence for sentence in reasons(plan))  # 100 x 4.281 GiB
    small = replace(smollm2(), host_bytes=None, pool_bytes=2 * GB)
    assert small.host_pool == 4 * GB  # a quarter of the memory


def test_a_growing_answer_never_takes_more_than_the_footprint_allows() -> None:
    case = llama(concurrency=None)
    plan = make_plan(replace(case, load=Workload(200, 20_000)))
    assert plan.oasis.holding.fits == 19_199 // 129  # the prompt is smaller than the footprint


def test_tensor_parallel_devices_copy_kv_heads_beyond_their_number() -> None:
    shape = read_shape("llama", LLAMA_8B)
    assert shape.split(4) == shape
    assert shape.split(16).kv_bytes_per_token == 2 * shape.kv_bytes_per_token
    two = ROUND.times(2)
    assert (two.memory_bytes, two.memory_bandwidth, two.link_bandwidth) == (160 * GB, 2 * TERA, 100 * GB)


# --- time, by hand


def test_llamas_dense_step() -> None:
    side = make_plan(llama()).dense
    # 7,504,658,432 parameters x 2 bytes: 15.009 ms. 9 requests x 32,500 tokens x 131,072: 38.339 ms. 1 ms.
    assert side.step.phases["weights"].seconds == pytest.approx(15.009317e-3)
    assert side.step.phases["attention"].seconds == pytest.approx(38.33856e-3)
    assert side.step.seconds == pytest.approx(54.347877e-3)
    assert side.tokens_per_second == pytest.approx(165.600, rel=1e-4)
    assert side.step.limit == "attention (memory)"


def test_llamas_bounded_step() -> None:
    plan = make_plan(llama())
    side = plan.oasis
    # 100 x 2,048 tokens x 131,072: 26.844 ms. Summaries: 100 x 2,031.25 parts x 512 x 32 x 8, every step: 26.624 ms.
    assert side.step.phases["attention"].seconds == pytest.approx(26.843546e-3)
    assert side.step.phases["scoring"].seconds == pytest.approx(26.624e-3)
    # 0.05 of 128 blocks: 6 pages x 8,192 bytes x 100 x 32 x 8 = 1,258 MB: 25.166 ms, within the step's 69.477.
    link = side.step.link
    assert link is not None
    assert (link.pages, link.wanted_bytes) == (6, 1_258_291_200)
    assert side.step.phases["link"].seconds == pytest.approx(25.165824e-3)
    assert side.step.seconds == pytest.approx(69.476863e-3)
    assert link.carried_bytes == pytest.approx(3.473843e9)
    assert link.carried_cap == pytest.approx(0.129411, rel=1e-4)  # of 26.84 GB, a whole budget
    assert side.tokens_per_second == pytest.approx(1439.33, rel=1e-4)
    assert plan.pays and plan.ratio == pytest.approx(8.6916, rel=1e-4)


def test_the_demos_bounded_step() -> None:
    side = make_plan(smollm2()).oasis
    # 268,959,744 bytes at 20 GB/s; 6 x 2,048 x 23,040 at 5; of 182.25 pages outlines of 256, of 128 the other 768 too,
    # so 6 x 144,960 x 90 / 4 at 1; 3 pages x 8,192 x 540 at 10, after the rest and not beside it.
    milliseconds = {name: 1e3 * phase.seconds for name, phase in side.step.phases.items()}
    expected = {"weights": 13.4479872, "attention": 56.623104, "scoring": 19.5696, "link": 1.327104, "overhead": 3}
    assert milliseconds == pytest.approx(expected)
    assert side.step.seconds == pytest.approx(93.9677952e-3)
    assert side.tokens_per_second == pytest.approx(63.8517, rel=1e-4)


def test_prefill_and_a_fleet() -> None:
    case = llama()
    # 2 x (7,504,658,432 - 525,336,576) x 32,000, the output matrix once, and 32,000 rows over 16,000 tokens on average:
    # 4 x 32 x 128 x 32 layers. 715.11 x 10^12 at half of 10^15.
    assert prefill_seconds(case.shape, case.device, case.load) == pytest.approx(1.430226, rel=1e-5)
    fleet = make_fleet(case, 2.0)
    assert (fleet.decode_dense, fleet.decode_oasis, fleet.prefill) == (13, 2, 3)  # 2,000 / 165.6, / 1,439; 2.86
    plan = make_plan(case)
    assert plan.dense.with_prefill == pytest.approx(1000 / (1000 / 165.600 + 1.430226), rel=1e-4)
    with pytest.raises(SettingsError, match="requests_per_second=0 "):
        make_fleet(case, 0)


def test_a_step_waits_for_a_link_that_is_too_slow() -> None:
    case = llama()
    slow = make_plan(replace(case, device=replace(ROUND, link_bandwidth=10 * GB)))
    link = slow.oasis.step.link
    assert link is not None and link.stretches
    assert slow.oasis.step.seconds == pytest.approx(5 * 25.165824e-3)  # the link's own time, not the sum
    assert link.carried_cap == pytest.approx(0.129411 / 5, rel=1e-4)
    assert any("--fetch-cap 0.026" in sentence for sentence in reasons(slow))
    enough = make_plan(replace(case, device=slow.case.device, settings=Settings(scorer="box", fetch_cap=0.025)))
    assert enough.oasis.step.link is not None and not enough.oasis.step.link.stretches


def test_the_automatic_cap_is_what_the_link_carries() -> None:
    link = make_plan(llama(fetch_cap="auto")).oasis.step.link
    assert link is not None and link.pages == 12  # a tenth of the budget; the link would carry 16.6
    slow = replace(llama(fetch_cap="auto"), device=replace(ROUND, link_bandwidth=10 * GB))
    assert make_plan(slow).oasis.step.link.pages == 3  # type: ignore[union-attr]


def test_drafts_multiply_arithmetic_and_tokens() -> None:
    case = llama()
    load = replace(case.load, draft_tokens=2, acceptance=0.5)
    assert load.tokens_per_step == 1.75
    plain, drafted = make_plan(case).oasis, make_plan(replace(case, load=load)).oasis
    assert drafted.holding.held_blocks == 130  # slots for the drafts
    # Memory binds: three rows take as long as one, and bring 1.75 tokens.
    assert drafted.tokens_per_second == pytest.approx(1.75 * plain.tokens_per_second)
    weak = replace(case, device=replace(ROUND, flops=100 * TERA))
    rows = [make_plan(replace(weak, load=each)).oasis.step.phases["weights"] for each in (case.load, load)]
    assert [phase.bound_by for phase in rows] == ["memory", "arithmetic"]
    assert rows[1].seconds == pytest.approx(2 * 7_504_658_432 * 300 / 1e14)


def test_attained_scales_every_rate() -> None:
    whole, part = make_plan(llama()), make_plan(replace(llama(), device=replace(ROUND, attained=0.5)))
    for name in ("weights", "attention", "scoring", "link"):
        assert part.oasis.step.phases[name].seconds == pytest.approx(2 * whole.oasis.step.phases[name].seconds)


# --- states


def test_within_the_budget_nothing_changes() -> None:
    case = replace(llama(concurrency=4), load=Workload(1_000, 100, 4))
    plan = make_plan(case)
    assert plan.oasis.holding.state == "dense"
    assert plan.ratio == 1 and not plan.pays
    assert "stay dense" in reasons(plan)[1]


def test_with_memory_to_spare_requests_read_their_budget_in_place() -> None:
    plan = make_plan(llama(concurrency=4))
    assert plan.oasis.holding.state == "in_place"
    assert plan.oasis.holding.held_blocks == 2_063 and plan.oasis.host_bytes == 0
    assert plan.oasis.step.link is None and "scoring" in plan.oasis.step.phases
    small_host = make_plan(llama(host_bytes=5 * 4_596_826_112))  # `auto` rather keeps 9 in full than 5 on the host
    assert (small_host.oasis.holding.state, small_host.oasis.running) == ("in_place", 9)
    assert make_plan(llama(concurrency=4, residency="bounded")).oasis.holding.state == "bounded"


@pytest.mark.parametrize(
    ("residency", "state"), [("dense", "dense"), ("in_place", "in_place"), ("bounded", "bounded"), ("auto", "bounded")]
)
def test_the_residency_that_is_asked_for(residency: str, state: str) -> None:
    assert make_plan(llama(residency=residency)).oasis.holding.state == state


def test_host_memory_that_is_the_devices_own_must_beat_giving_it_to_vllm() -> None:
    plan = make_plan(replace(smollm2(), device=replace(ROUND_CPU, summary_bandwidth=0.18 * GB)))
    assert plan.ratio > 1 and plan.pooled is not None
    assert plan.pooled.tokens_per_second > plan.oasis.tokens_per_second
    assert not plan.pays
    assert "given the same memory" in reasons(plan)[0]


# --- refusals


def test_bad_loads_are_refused() -> None:
    for fields in ({"prompt_tokens": 0}, {"output_tokens": 0}, {"concurrency": 0}, {"draft_tokens": -1}):
        with pytest.raises(SettingsError, match=next(iter(fields))):
            replace(Workload(1, 1), **fields)
    for fields in ({"acceptance": 1.5}, {"mfu": 0.0}):
        with pytest.raises(SettingsError, match=next(iter(fields))):
            replace(Workload(1, 1), **fields)


def test_what_does_not_fit_is_refused_with_the_number_that_would() -> None:
    case = llama()
    with pytest.raises(SettingsError, match=r"131,?073 tokens .* longer than the 131072 of llama"):
        make_plan(replace(case, load=Workload(131_072, 1)))
    with pytest.raises(SettingsError, match=r"4\.000 GiB does not hold .* allowed is 4\.031 or more"):  # 2,064 blocks
        make_plan(replace(case, pool_bytes=4 * GIB))
    with pytest.raises(SettingsError, match="beside 130 for summaries"):  # 2,064 blocks hold it, 1,935 do not
        make_plan(replace(case, pool_bytes=2_080 * 2_097_152))
    bounded = llama(host_bytes=4 * GIB, residency="bounded")
    with pytest.raises(SettingsError, match=r"--host-gib 4\.281 or more"):
        make_plan(bounded)
    with pytest.raises(SettingsError, match="no hot slot"):
        make_plan(replace(case, settings=Settings(budget_tokens=96, window_tokens=64), oasis_block=32))


def test_an_unknown_device_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"device='h900' .* h100, h200"):
        preset("h900")
    assert preset("H100") is PRESETS["h100"]
    with pytest.raises(SettingsError, match="link_bandwidth=0 "):
        ROUND.with_numbers(link_bandwidth=0.0)
    with pytest.raises(SettingsError, match=r"attained=2 .* share"):
        ROUND.with_numbers(attained=2.0)
    assert ROUND_CPU.with_numbers(memory_bandwidth=1e9).kv_bandwidth == 0  # the new number is for KV too


@pytest.mark.parametrize("device", [d for d in PRESETS.values() if not d.shared_memory], ids=lambda d: d.name)
def test_llama_with_long_prompts_pays_on_every_gpu(device: Device) -> None:
    case = llama(concurrency=None, host_bytes=None)
    pool = device.pool_bytes(case.shape.held_bytes)
    plan = make_plan(replace(case, device=device, pool_bytes=pool))
    assert device.source
    assert plan.oasis.running > plan.dense.running > 0
    assert plan.pays


# --- what holds for every load

prompts = st.integers(1, 100_000)
outputs = st.integers(1, 10_000)
counts = st.one_of(st.none(), st.integers(1, 500))


def plan_for(prompt: int, output: int, concurrency: int | None, device: Device = ROUND, pool: int = 40 * GIB):
    case = llama(concurrency, residency="bounded", fetch_cap=0.05)
    return make_plan(replace(case, load=Workload(prompt, output, concurrency), device=device, pool_bytes=pool))


@given(prompts, outputs, counts, st.integers(1, 20_000))
def test_a_longer_context_never_raises_dense_throughput(p: int, o: int, n: int | None, more: int) -> None:
    assert plan_for(p + more, o, n).dense.tokens_per_second <= plan_for(p, o, n).dense.tokens_per_second * (1 + 1e-9)


@given(prompts, outputs, counts, st.floats(1, 10))
def test_a_faster_link_or_memory_never_slows_either_side(p: int, o: int, n: int | None, times: float) -> None:
    before = plan_for(p, o, n)
    for name in ("link_bandwidth", "memory_bandwidth", "flops"):
        faster = plan_for(p, o, n, replace(ROUND, **{name: getattr(ROUND, name) * times}))
        assert faster.oasis.tokens_per_second >= before.oasis.tokens_per_second * (1 - 1e-9)
        assert faster.dense.tokens_per_second >= before.dense.tokens_per_second * (1 - 1e-9)


@given(prompts, outputs, counts, st.integers(1, 40))
def test_a_larger_pool_never_runs_fewer(p: int, o: int, n: int | None, more: int) -> None:
    before, after = plan_for(p, o, n), plan_for(p, o, n, pool=(40 + more) * GIB)
    assert after.dense.running >= before.dense.running
    assert after.oasis.running >= before.oasis.running


@given(prompts, outputs, counts, st.sampled_from([16, 32, 64]))
def test_what_runs_fits_in_the_pool(p: int, o: int, n: int | None, block: int) -> None:
    case = llama(n, residency="bounded")
    load = Workload(p, o, n)
    dense = hold_dense(case.shape, load, case.pool_bytes, block)
    held = hold_oasis(case.shape, load, case.settings, SummaryBytes(32 * block), case.pool_bytes, block, 10**13)
    assert dense.running(load) * dense.held_blocks <= dense.pool_blocks
    for here in (True, False):
        running = held.running(replace(load, prefill_here=here))
        assert running * held.held_blocks <= held.pool_blocks
    assert held.fits <= held.fits_elsewhere
