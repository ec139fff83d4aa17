"""Every row equals reference attention over exactly its resident set, whatever else is going on.

``verifier.py`` works the right output of each row out from the keys and values that went into the attention layer and
from the set of blocks that the row may see. Each test here sets up one way of serving, and asks for at least 1,000
sparse rows within 1e-5; the drafter's own rows and dense rows are held to the same.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, engine, prompt
from tiny import make_tiny_llama
from verifier import Report

from oasiskv.core import kernels
from oasiskv.core.pipeline import InlinePipeline
from oasiskv.vllm_plugin.backend_cpu import OasisCPUImpl

EXACT = 1e-5
ROWS = 1000

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
LENGTHS = tuple(range(600, 800, 37))
PROMPTS = [prompt(n, seed) for seed, n in enumerate(LENGTHS)]
STATES = pytest.mark.parametrize("residency", ["in_place", "bounded"])


def check(report: Report, residency: str, rows: int = ROWS) -> None:
    """The sparse rows are as many as asked for, and every row is exact."""
    assert report.rows.get(residency, 0) >= rows, f"only {report}"
    assert max(report.worst.values()) < EXACT, str(report)


def drafter(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


class Models:
    """The tiny models of a session."""

    def __init__(self, llama: Path, steady: Path, draft: Path) -> None:
        self.llama, self.steady, self.draft = llama, steady, draft


@pytest.fixture(scope="session")
def models(tiny_llama: Path, steady_llama: Path, tiny_draft: Path) -> Models:
    return Models(tiny_llama, steady_llama, tiny_draft)


class Speculation:
    """A way to decode: the target model, the configuration of speculation, and how many tokens make 1,000 rows."""

    def __init__(self, name: str, models: Models) -> None:
        self.drafter = name.startswith("draft")
        self.model = models.steady if name in ("ngram", "draft_itself") else models.llama
        config = {
            "alone": None,
            "ngram": NGRAM,
            "draft_model": drafter(models.draft),  # its drafts are refused
            "draft_itself": drafter(models.steady),  # its drafts are accepted
        }[name]
        self.vllm = {} if config is None else {"speculative_config": config}
        self.tokens = 24 if name == "draft_model" else 70

    def check(self, e: Engine) -> None:
        """What this way is there for has happened."""
        if not self.vllm:
            assert e.drafted == 0
            return
        refused = e.drafted - e.accepted
        assert e.drafted > 100 and refused > 0
        if self.tokens == 70:
            assert e.accepted > 50


@pytest.fixture(params=["alone", "ngram", "draft_model", "draft_itself"])
def speculation(request: pytest.FixtureRequest, models: Models) -> Speculation:
    return Speculation(request.param, models)


# --- the states, crossed with speculation and granularity


@pytest.mark.parametrize("granularity", ["head", "layer"])
@STATES
def test_rows_are_exact(verified: Any, speculation: Speculation, residency: str, granularity: str) -> None:
    with engine(speculation.model, vllm=speculation.vllm, residency=residency, granularity=granularity) as e:
        report = e.verify()
        e.generate(PROMPTS, speculation.tokens)
        verified(report)
        check(report, residency)
        speculation.check(e)
        assert report.most_blocks <= 8 + 2, "budget, tail, and one block begun by drafts"
        assert e.counts["swaps_capped"] > 0, "the cap was never reached, so this did not test it"
        if speculation.drafter:
            assert report.rows["bounded draft" if residency == "bounded" else "dense"] >= 400


@pytest.mark.parametrize("spec", ["alone", "draft_model", "ngram"])
@STATES
def test_with_the_cap_off(models: Models, verified: Any, spec: str, residency: str) -> None:
    how = Speculation(spec, models)
    with engine(how.model, vllm=how.vllm, residency=residency, fetch_cap=1) as e:
        report = e.verify()
        e.generate(PROMPTS, how.tokens)
        verified(report)
        check(report, residency)
        assert e.counts["swaps_capped"] == 0
        assert e.counts["misses"] > 1000


# --- where a layer's choice is one call of the compiled kernels; and where vLLM's kernel attends

AT_ONCE: dict[str, Any] = {"scorer": "q2", "score_interval": 1}


def direct_calls(e: Engine) -> list[bool]:
    """Whether the call did the work, each time that it was tried."""
    made, choose = [], e.worker._direct.choose

    def watched(*args: Any) -> bool:
        made.append(choose(*args))
        return made[-1]

    e.worker._direct.choose = watched
    return made


@STATES
def test_with_choices_in_one_call(models: Models, verified: Any, speculation: Speculation, residency: str) -> None:
    """Shared prefixes, chunks and budgets of the requests' own, besides the drafts."""
    document = prompt(500, seed=100)
    vllm = {"max_num_batched_tokens": 250, **speculation.vllm}
    with engine(speculation.model, vllm=vllm, residency=residency, **AT_ONCE) as e:
        report, made = e.verify(), direct_calls(e)
        for i in range(6):
            own = {"extra_args": {"oasis_budget_tokens": 160}} if i % 3 == 0 else {}
            e.submit(document + prompt(90 + 37 * i, seed=i), max_tokens=speculation.tokens + i, **own)
        e.run()
        verified(report)
        check(report, residency)
        speculation.check(e)
        assert e.counts["misses"] > 100
        if kernels.are_built():
            assert made.count(True) > 50 and (all(made) or speculation.drafter)


def test_with_choices_in_one_call_and_preemption(models: Models, verified: Any) -> None:
    vllm = {"num_gpu_blocks_override": 60, "max_model_len": 1024}
    with engine(models.llama, vllm=vllm, residency="auto", **AT_ONCE) as e:
        report, made = e.verify(), direct_calls(e)
        for i in range(6):
            e.submit(prompt(130, seed=i), max_tokens=160)
        for i in range(3):
            e.submit(prompt(500, seed=20 + i), max_tokens=130)
        e.run()
        verified(report)
        assert sum(report.rows.get(state, 0) for state in ("in_place", "bounded")) >= ROWS
        assert max(report.worst.values()) < EXACT, str(report)
        assert {state for _, state in e.preempted} & {"IN_PLACE", "BOUNDED"}
        assert not kernels.are_built() or (made and all(made))


@STATES
def test_with_vllms_own_kernel(models: Models, verified: Any, residency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves AMX, float16, soft caps, and machines without a compiler."""
    monkeypatch.setattr(OasisCPUImpl, "_decode", lambda *_: None)
    with engine(models.llama, vllm={"speculative_config": NGRAM}, residency=residency) as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, residency)


# --- pages that are not there in time


class LatePipeline(InlinePipeline[Any]):
    """Every job is late: the first ``late`` times that its layer asks for it without waiting, it is not ready."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        self.asked: Counter[int] = Counter()

    def take(self, layer: int, wait: bool = False) -> Any:
        if not wait and self.busy(layer) and self.asked[layer] < self.late:
            self.asked[layer] += 1
            return None
        self.asked[layer] = 0
        return super().take(layer, wait)


@pytest.mark.parametrize("late", [1, 4])
@STATES
def test_with_late_pages(models: Models, verified: Any, residency: str, late: int) -> None:
    with engine(models.llama, residency=residency, fetch_cap=1) as e:
        e.worker.pipeline = LatePipeline(late)
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, residency)
        assert e.counts["late_plans"] > 80 and e.counts["misses"] > 100


def test_with_late_pages_and_drafts(models: Models, verified: Any) -> None:
    with engine(models.llama, vllm={"speculative_config": drafter(models.draft)}, fetch_cap=1) as e:
        e.worker.pipeline = LatePipeline(2)
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, "bounded")
        assert e.counts["late_plans"] > 100


@STATES
def test_with_the_background_thread(models: Models, verified: Any, residency: str) -> None:
    with engine(models.llama, residency=residency, pipeline="async") as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, residency)


@STATES
def test_with_misses_fetched_at_once(models: Models, verified: Any, residency: str) -> None:
    with engine(models.llama, residency=residency, miss_policy="fetch") as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, residency)


# --- how prompts come in


@STATES
def test_with_chunked_prefill(models: Models, verified: Any, residency: str) -> None:
    """Chunks that end anywhere, beside requests that decode already."""
    with engine(models.llama, vllm={"max_num_batched_tokens": 250}, residency=residency) as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, residency)


@pytest.mark.parametrize("spec", ["alone", "draft_model"])
@STATES
def test_with_shared_prefixes(models: Models, verified: Any, spec: str, residency: str) -> None:
    """Two waves over one document: blocks that the cache hits bring have their summaries and get host copies."""
    how = Speculation(spec, models)
    document = prompt(500, seed=100)
    questions = [document + prompt(90 + 37 * i, seed=i) for i in range(3)]
    with engine(how.model, vllm=how.vllm, residency=residency) as e:
        report = e.verify()
        for _ in range(2):
            e.generate(questions, max_tokens=80)
        e.generate([document + prompt(150, seed=50)], max_tokens=80)
        verified(report)
        check(report, residency)
        assert e.hits > 4 * 480, f"only {e.hits} tokens came from the prefix cache"


@pytest.mark.parametrize("spec", ["alone", "ngram"])
@STATES
def test_with_several_samples_of_a_prompt(models: Models, verified: Any, spec: str, residency: str) -> None:
    how = Speculation(spec, models)
    with engine(how.model, vllm=how.vllm, residency=residency) as e:
        report = e.verify()
        samples = e.generate(PROMPTS[:2], max_tokens=80, n=3, temperature=0.8)
        assert all(len(s) == 3 and s[0] != s[1] for s in samples)
        verified(report)
        check(report, residency)


# --- too little of everything


@pytest.mark.parametrize("residency", ["in_place", "bounded", "auto"])
def test_with_preemption(models: Models, verified: Any, residency: str) -> None:
    """A pool in which requests outgrow each other: some are thrown out in every state, and come back."""
    pool = {"in_place": 76, "bounded": 60, "auto": 60}[residency]
    vllm = {"num_gpu_blocks_override": pool, "max_model_len": 1024}
    with engine(models.llama, vllm=vllm, residency=residency) as e:
        report = e.verify()
        for i in range(6):  # these outgrow the pool ...
            e.submit(prompt(130, seed=i), max_tokens=160)
        for i in range(3):  # ... and these, which came last, give way
            e.submit(prompt(500, seed=20 + i), max_tokens=130)
        e.run()
        verified(report)
        sparse = report.rows.get("in_place", 0) + report.rows.get("bounded", 0)
        assert sparse >= ROWS and max(report.worst.values()) < EXACT, str(report)
        states = {state for _, state in e.preempted}
        assert states & {"IN_PLACE", "BOUNDED"}, f"preempted were only {states}"


def test_with_budgets_of_the_requests_own(models: Models, verified: Any) -> None:
    budgets = [None, 128, 160, 224, 256]
    with engine(models.llama) as e:
        report = e.verify()
        names = [
            e.submit(
                prompt(600 + 37 * i, seed=i),
                max_tokens=80,
                extra_args={} if budget is None else {"oasis_budget_tokens": budget},
            )
            for i, budget in enumerate(budgets)
        ]
        for _ in range(20):
            e.step()
        held = [len(e.blocks_of(e.request_id(name))) for name in names]
        e.run()
        verified(report)
        check(report, "bounded")
        assert held == [8 + 1, 4 + 1, 5 + 1, 7 + 1, 8 + 1], "the budget in blocks, and a tail"


# --- the settings


@pytest.mark.parametrize(
    "settings",
    [
        {"scorer": "minmax"},
        {"scorer": "mean"},
        {"scorer": "q2"},
        {"scorer": "box", "summary_dtype": "int8"},
        {"scorer": "q2", "summary_dtype": "bfloat16"},
        {"group_merge": "softmax_max"},
        {"group_merge": "mean"},
        {"group_merge": "max"},
        {"fetch_cap": "auto"},
        {"sink_tokens": 40, "window_tokens": 100, "budget_tokens": 288},
        {"min_context_tokens": 0, "budget_tokens": 128},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
def test_with_setting(models: Models, verified: Any, settings: dict[str, Any]) -> None:
    with engine(models.llama, **settings) as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        check(report, "bounded")


@pytest.mark.parametrize("predictor", ["both", "lookahead", "current"])
def test_with_predictor(models: Models, verified: Any, predictor: str) -> None:
    with engine(models.llama, vllm={"speculative_config": drafter(models.draft)}, predictor=predictor) as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=24)
        verified(report)
        check(report, "bounded")


@pytest.mark.parametrize(("block_size", "budget"), [(64, 384), (128, 640)])
@STATES
def test_with_block_size(models: Models, verified: Any, block_size: int, budget: int, residency: str) -> None:
    vllm = {"block_size": block_size, "num_gpu_blocks_override": 300 * 32 // block_size}
    with engine(models.llama, vllm=vllm, residency=residency, budget_tokens=budget) as e:
        report = e.verify()
        e.generate([prompt(1000 + 37 * i, seed=i) for i in range(4)], max_tokens=100)
        verified(report)
        check(report, residency)


@pytest.mark.parametrize("granularity", ["head", "layer"])
@STATES
def test_in_bfloat16(
    models: Models, verified: Any, residency: str, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worse than twice vLLM's own kernel on the same kinds of rows."""

    def worst() -> dict[str, float]:
        with engine(models.llama, vllm={"dtype": "bfloat16"}, residency=residency, granularity=granularity) as e:
            report = e.verify()
            short = [prompt(100 + 10 * i, seed=40 + i) for i in range(4)]
            e.generate([*PROMPTS, *short], max_tokens=90)
            verified(report)
            assert report.rows[residency] >= ROWS and report.rows["dense"] >= ROWS
            return report.worst

    found = worst()
    monkeypatch.setattr(OasisCPUImpl, "_decode", lambda *_: None)
    stock = worst()
    assert found[residency] <= 2 * stock[residency] and found["dense"] <= 2 * stock["dense"], f"{found}, {stock}"


def test_with_everything_at_once(models: Models, verified: Any) -> None:
    """Drafts, chunks, shared prefixes, samples, small budgets, late pages, a small pool, a request that is aborted."""
    vllm = {
        "speculative_config": drafter(models.steady),
        "max_num_batched_tokens": 200,
        "num_gpu_blocks_override": 56,
        "max_model_len": 1024,
    }
    document = prompt(320, seed=7)
    with engine(models.steady, vllm=vllm, residency="auto", fetch_cap=0.3) as e:
        e.worker.pipeline = LatePipeline(1)
        report = e.verify()
        for i in range(9):
            own = {"extra_args": {"oasis_budget_tokens": 160}} if i % 3 == 0 else {}
            samples = {"n": 2, "temperature": 0.7} if i % 4 == 1 else {}
            e.submit(document + prompt(20 + 53 * (i % 5), seed=i), max_tokens=120 + i, **own, **samples)
            if i == 6:
                doomed = e.submit(document + prompt(100, seed=99), max_tokens=200)
            for _ in range(5):
                e.step()
        e.abort(doomed)
        e.run()
        verified(report)
        assert report.rows["in_place"] >= ROWS and report.rows["bounded"] > 300 and report.rows["bounded draft"] > 300
        assert max(report.worst.values()) < EXACT, str(report)
        assert e.preempted and e.accepted and e.counts["late_plans"] and e.hits


@pytest.mark.parametrize("heads", [1, 4])
def test_with_a_drafter_of_other_heads(models: Models, verified: Any, tmp_path: Path, heads: int) -> None:
    """The target has two KV heads; all of the drafter's share one set."""
    draft = make_tiny_llama(tmp_path / "draft", seed=3, num_hidden_layers=1, num_key_value_heads=heads)
    with engine(models.llama, vllm={"speculative_config": drafter(draft)}) as e:
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        assert report.rows["bounded"] >= ROWS and report.rows["bounded draft"] > 300
        assert max(report.worst.values()) < EXACT, str(report)


# --- what is chosen


@pytest.mark.parametrize("settings", [{"scorer": "box"}, AT_ONCE], ids=["in jobs", "in one call"])
@pytest.mark.parametrize("spec", ["alone", "ngram"])
def test_bounded_chooses_the_same_blocks_as_in_place(models: Models, spec: str, settings: dict[str, Any]) -> None:
    """With the cap off and pages on time: for every request, context length, layer and KV head.

    Not with a draft model: it sees other blocks in the two states, drafts other tokens, and so has other steps.
    """
    how = Speculation(spec, models)
    chosen, tokens = [], []
    for residency in ("in_place", "bounded"):
        with engine(how.model, vllm=how.vllm, residency=residency, fetch_cap=1, **settings) as e:
            report = e.verify(record_choices=True)
            tokens.append(e.generate(PROMPTS, max_tokens=60))
            chosen.append(report.choices)
    assert tokens[0] == tokens[1]
    assert len(chosen[0]) >= 500 and chosen[0].keys() == chosen[1].keys()
    differing = [key for key in chosen[0] if chosen[0][key] != chosen[1][key]]
    assert not differing, f"{len(differing)} of {len(chosen[0])} differ, the first at {differing[:3]}"
    assert len({str(c) for c in chosen[0].values()}) > 100, "the choice hardly ever changed"
