"""The coverage study on a tiny random Llama: against plain transformers, and against what must hold for any weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oasiskv.core.settings import Settings
from oasiskv.eval.policies import Policy
from oasiskv.eval.study import CoverageStudy, Measures, prefill, run

BLOCK, STEPS = 16, 36


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(97, (405 + STEPS,), generator=torch.Generator().manual_seed(1)).tolist()


def study(model, tokens, scorers, budget, **settings) -> Measures:
    prompt, continuation = tokens[:405], tokens[405:]  # no whole number of blocks
    chosen = Settings(budget_tokens=budget, sink_tokens=16, window_tokens=16, **settings)
    policies = [Policy(name, torch.float32, chosen) for name in scorers]
    return run(model, CoverageStudy(prefill(model, prompt), policies, BLOCK, STEPS), continuation)


def test_dense_row_is_plain_transformers(model, tokens):
    measures = study(model, tokens, ["box"], budget=96)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, 405:-1]
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[406:]), reduction="none")
    torch.testing.assert_close(measures.nll[:, 0], nll, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(measures.mass[:, 0], torch.ones(STEPS - 1, 2, 4))


def test_a_budget_that_holds_the_context_changes_nothing(model, tokens):
    measures = study(model, tokens, ["random", "box", "q2"], budget=512, score_interval=1)
    torch.testing.assert_close(measures.mass, torch.ones_like(measures.mass))
    torch.testing.assert_close(measures.nll, measures.nll[:, :1].expand_as(measures.nll), rtol=0, atol=1e-5)
    assert measures.same_top.all() and measures.kl.abs().max() < 1e-5


@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_the_oracle_holds_more_than_the_others(model, tokens, granularity):
    measures = study(model, tokens, ["oracle", "box", "random"], budget=96, granularity=granularity, fetch_cap=1)
    _, oracle, box, random = measures.mass.mean((0, 2, 3)).tolist()
    assert oracle > box > random
    assert measures.kl[:, 1].mean() < measures.kl[:, 3].mean()


def test_only_middle_blocks_are_ever_missing(model, tokens):
    measures = study(model, tokens, ["box", "random"], budget=96)
    missing = 1 - measures.mass[:, 1:].mean((2, 3))
    assert (missing > 0).all() and (missing < measures.middle.unsqueeze(1)).all()


def test_the_open_loop_does_not_depend_on_who_else_is_there(model, tokens):
    together, alone = study(model, tokens, ["mean", "box"], budget=96), study(model, tokens, ["box"], budget=96)
    torch.testing.assert_close(together.mass[:, 2], alone.mass[:, 1])
    torch.testing.assert_close(together.nll[:, 2], alone.nll[:, 1], rtol=0, atol=1e-4)


def test_policies_of_different_budgets_do_not_touch_each_other(model, tokens):
    prompt, continuation = tokens[:405], tokens[405:]
    small, large = (
        Policy("box", torch.float32, Settings(budget_tokens=n, sink_tokens=16, window_tokens=16)) for n in (96, 192)
    )
    start = prefill(model, prompt)
    together = run(model, CoverageStudy(start, [small, large], BLOCK, STEPS), continuation)
    alone = run(model, CoverageStudy(start, [large], BLOCK, STEPS), continuation)
    torch.testing.assert_close(together.mass[:, 2], alone.mass[:, 1])
    torch.testing.assert_close(together.nll[:, 2], alone.nll[:, 1], rtol=0, atol=1e-4)
    assert together.mass[:, 1].mean() < together.mass[:, 2].mean()


def test_the_overlap_is_with_the_blocks_of_most_mass(model, tokens):
    measures = study(model, tokens, ["oracle", "random"], budget=96, fetch_cap=1)
    _, oracle, random = measures.overlap.mean((0, 2, 3)).tolist()
    assert measures.overlap[:, 0].eq(1).all()
    assert 0 < random < oracle < 1  # the oracle's last look was at the step before


@pytest.mark.parametrize("budget", [96, 160, 256])
def test_at_every_budget_random_is_worse_and_the_oracle_better_than_a_scorer(model, tokens, budget):
    measures = study(model, tokens, ["random", "box", "oracle"], budget=budget, fetch_cap=1)
    for seen in (measures.mass, measures.overlap):
        _, random, box, oracle = seen.mean((0, 2, 3)).tolist()
        assert random < box < oracle


def test_a_layer_is_scored_every_so_many_steps(model, tokens):
    often, seldom = (
        study(model, tokens, ["random"], budget=96, fetch_cap=1, score_interval=n).pages_in[:, 1] for n in (1, 3)
    )
    assert (often > 0).all()
    assert ((seldom > 0).float().mean() - 2 / 3).abs() < 0.05  # two layers, a third of the steps each


def test_never_more_pages_than_the_cap(model, tokens):
    measures = study(model, tokens, ["random"], budget=96, fetch_cap=0.3)  # of 6 blocks: 2
    assert measures.pages_in.max() == 2
