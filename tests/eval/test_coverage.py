"""The report of the coverage study: what its columns are computed from."""

from __future__ import annotations

import argparse

import pytest
import torch

from oasiskv.core.settings import Settings, SettingsError
from oasiskv.eval import coverage
from oasiskv.eval.coverage import Outcome, coverage_table, findings, likelihood_table
from oasiskv.eval.policies import Policy, label, parse_scorer, policies
from oasiskv.eval.study import Measures

LAYERS, HEADS, STEPS = 4, 2, 3


def flat(*by_policy: float) -> torch.Tensor:
    """``[steps, B, layers, heads]`` with the same value everywhere for each batch row."""
    return torch.tensor(by_policy).view(1, -1, 1, 1).expand(STEPS, -1, LAYERS, HEADS).clone()


@pytest.fixture
def outcome() -> Outcome:
    mass = flat(1.0, 0.85, 0.95)
    mass[:, 1, 2] -= 0.15  # in layer 2 box holds less
    mass[0, 1, 3, 1] = 0.25
    measures = Measures(
        nll=torch.tensor([[1.0, 1.5, 1.0], [2.0, 2.5, 2.0], [3.0, 5.0, 3.0]]),
        kl=torch.tensor([[0.0, 0.1, 0.0], [0.0, 0.2, 0.0], [0.0, 0.3, 0.0]]),
        same_top=torch.tensor([[True, True, True], [True, False, True], [True, False, True]]),
        mass=mass,
        overlap=flat(1.0, 0.5, 1.0),
        middle=torch.tensor([0.4, 0.4, 0.4]),
        pages_in=torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]),
    )
    return Outcome([Policy("box"), Policy("oracle")], measures, torch.tensor([False, True, True]), (STEPS,))


def test_coverage_names_mean_first_percentile_worst_and_the_worst_layers(outcome: Outcome) -> None:
    box, oracle = coverage_table(outcome, "t").rows
    mean = (0.85 * 24 - 0.15 * 6 - 0.6) / 24
    assert box[:4] == ("box", f"{100 * mean:.1f}", "25.0", "25.0")
    assert box[4] == f"{100 * (1 - (1 - mean) / 0.4):.1f}"
    assert box[5] == "50"
    assert box[6].startswith("2: 70, 3: 75")
    assert oracle[1:6] == ("95.0", "95.0", "95.0", "87.5", "100")


def test_likelihood_is_less_dense_on_answers_and_on_all(outcome: Outcome) -> None:
    dense, box, oracle = likelihood_table(outcome, "t").rows
    assert dense[1:3] == ("2.500 (NLL)", "2.000 (NLL)")
    assert box[1].startswith("+1.250") and box[2].startswith("+1.000") and box[3].startswith("+0.200")
    assert (box[4], box[5], oracle[4]) == ("33", "1.0", "100")


def test_nothing_is_said_of_answers_where_there_are_none(outcome: Outcome) -> None:
    plain = Outcome(outcome.policies, outcome.measures, torch.zeros(STEPS, dtype=torch.bool), (STEPS,))
    assert likelihood_table(plain, "t").rows[1][1] == "n/a"


def test_findings_put_the_best_real_scorer_beside_the_oracle(outcome: Outcome) -> None:
    (sentence,) = findings(outcome)
    assert sentence.startswith("Budget 2,048: box holds 78.7% of the softmax mass (oracle 95.0%)")


# -- policies


@pytest.mark.parametrize("text", ["box", "box:int8", "q2:float32"])
def test_scorers_are_named_as_they_are_given(text: str) -> None:
    found = Policy(*parse_scorer(text))
    assert label(found, [found]) == text


def test_a_label_says_what_differs_and_nothing_else() -> None:
    found = policies(
        [parse_scorer("box")], {}, budget_tokens=[512, 1024], granularity=["head", "layer"], fetch_cap=[0.05]
    )
    assert [label(p, found) for p in found] == [
        "box 512 per head",
        "box 512 per layer",
        "box 1024 per head",
        "box 1024 per layer",
    ]


def test_a_scorer_is_asked_as_often_as_the_engine_asks_it() -> None:
    assert [Policy(name).interval for name in ("q2", "box", "oracle", "random")] == [4, 1, 1, 1]
    assert Policy("oracle", settings=Settings(score_interval=3)).interval == 3


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    coverage.add_options(parser)
    return parser.parse_args(list(arguments))


def test_the_command_line_makes_every_combination() -> None:
    found = coverage.chosen_policies(options("--budgets", "512,1024", "--scorers", "q2,random", "--caps", "0.05,1"), {})
    assert len(found) == 8
    assert {(p.scorer, p.settings.budget_tokens, p.settings.fetch_cap) for p in found} == {
        (s, b, c) for s in ("q2", "random") for b in (512, 1024) for c in (0.05, 1.0)
    }


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--scorers", "bex:int4"), ValueError, "'bex:int4' is not allowed: a scorer .*minmax"),
        (("--budgets", "64"), SettingsError, "no room for hot slots"),
        (("--budgets", "100"), SettingsError, "leaves no hot slot"),
        (("--predictors", "oracle"), SettingsError, "predictor='oracle' is not allowed"),
    ],
)
def test_what_is_wrong_is_refused(arguments: tuple[str, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        coverage.chosen_policies(options(*arguments), {})


def test_other_settings_go_to_every_policy() -> None:
    found = coverage.chosen_policies(options("--scorers", "q2,box"), {"score_interval": 2, "window_tokens": 128})
    assert {(p.interval, p.settings.window_tokens) for p in found} == {(2, 128)}
