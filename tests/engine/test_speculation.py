"""Speculation beside OasisKV: drafts are committed as vLLM does, and hardly fewer of them are accepted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import ENGINE, engine, prompt

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
PROMPTS = [prompt(n, seed=n) for n in (40, 200, 333, 512, 640, 767)]


def drafter(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.parametrize("spec", ["ngram", "draft_model"])
@pytest.mark.parametrize("residency", ["in_place", "bounded"])
def test_with_a_budget_as_long_as_the_context_tokens_and_drafts_are_those_of_vllm(
    steady_llama: Path, spec: str, residency: str
) -> None:
    vllm = {"speculative_config": NGRAM if spec == "ngram" else drafter(steady_llama)}
    with engine(steady_llama, stock=True) as e:
        alone = e.generate(PROMPTS, max_tokens=40)
    with engine(steady_llama, stock=True, vllm=vllm) as e:
        stock = e.generate(PROMPTS, max_tokens=40)
        counted = e.drafted, e.accepted
    with engine(steady_llama, vllm=vllm, residency=residency, budget_tokens=ENGINE["max_model_len"]) as e:
        ours = e.generate(PROMPTS, max_tokens=40)
        assert (e.drafted, e.accepted) == counted
    assert ours == stock == alone
    assert counted[1] > 30


@pytest.mark.parametrize("spec", ["ngram", "draft_model"])
def test_requests_that_sample_and_greedy_ones_do_not_disturb_each_other(steady_llama: Path, spec: str) -> None:
    """Sampling from the one best token is greedy too. Stock vLLM divides by uninitialised memory here."""
    vllm = {"speculative_config": NGRAM if spec == "ngram" else drafter(steady_llama)}
    with engine(steady_llama, vllm=vllm, residency="dense") as e:
        greedy = e.generate(PROMPTS, max_tokens=40)
        for top_k in (1, 500):
            names = [e.submit(p, 40, temperature=2.0 * (i % 2), top_k=top_k) for i, p in enumerate(PROMPTS)]
            done = e.run()
            same = [done[name] == tokens for name, tokens in zip(names, greedy, strict=True)]
            assert same == [True, top_k == 1] * 3


def _copying_text(tokenizer: Any, seed: int) -> list[int]:
    """A list of orders, other text, and the list begun again: a text that goes on by copying."""
    words = random.Random(seed)
    names = ["Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas"]
    goods = ["apples", "bricks", "candles", "drums", "engines", "flowers", "gloves", "hammers", "inks", "jars"]
    orders = "".join(
        f"{i}. {words.choice(names)} ordered {words.randrange(2, 99)} {words.choice(goods)} "
        f"and {words.randrange(2, 99)} {words.choice(goods)}.\n"
        for i in range(1, 26)
    )
    story = "\n".join(
        f"{words.choice(names)} met {words.choice(names)} near the shop that sold {words.choice(goods)}, and they "
        f"talked about {words.choice(goods)} until it was late."
        for _ in range(40)
    )
    begun = "\n".join(orders.splitlines()[:3])
    return list(tokenizer(f"Orders:\n{orders}\nA story:\n{story}\n\nOrders, once more:\n{begun}\n")["input_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["in_place", "bounded"])
@pytest.mark.parametrize("spec", ["ngram", "draft_model"])
def test_hardly_fewer_drafts_are_accepted_than_by_dense_vllm(residency: str, spec: str) -> None:
    """Real weights, a text that repeats itself, half of its context on the device: at least 0.9 of dense's rate."""
    from transformers import AutoTokenizer

    from oasiskv.models import resolve_model

    folder = Path(resolve_model("smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [_copying_text(tokenizer, seed) for seed in range(4)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    vllm = {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "speculative_config": ngram if spec == "ngram" else drafter(folder),
    }
    rates = []
    for stock in (True, False):
        with engine(folder, stock=stock, vllm=vllm, residency=residency, budget_tokens=1024) as e:
            e.generate(prompts, max_tokens=100)
            rates.append(e.accepted / e.drafted)
            assert e.drafted > 100
    dense, sparse = rates
    print(
        f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens; drafts accepted: dense {dense:.3f}, "
        f"{residency} {sparse:.3f}"
    )
    assert dense > 0.3
    assert sparse >= 0.9 * dense
