"""The report of the retrieval study: what its columns are computed from."""

import argparse

import pytest
import torch

from oasiskv.eval.coverage import Measures, Policy
from oasiskv.eval.retrieval import COLUMNS, Outcome, label, main, markdown, mean_and_error, parse_policy, rows


@pytest.fixture
def outcome() -> Outcome:
    measures = Measures(
        nll=torch.tensor([[1.0, 1.5], [2.0, 2.5], [3.0, 5.0]]),
        kl=torch.tensor([[0.0, 0.1], [0.0, 0.2], [0.0, 0.3]]),
        same_top=torch.tensor([[True, True], [True, False], [True, False]]),
        mass=torch.tensor([[1.0, 0.8], [1.0, 0.9], [1.0, 0.85]]),
        middle=torch.tensor([0.3, 0.3, 0.3]),
        pages_in=torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 0.0]]),
    )
    return Outcome(["dense", "box"], measures, torch.tensor([False, True, True]))


def test_columns(outcome):
    dense, box = rows(outcome)
    assert dense == ("dense", "100.0", "100.0", "2.500 (NLL)", "2.000 (NLL)", "0", "100", "0.0")
    # 0.15 of the mass is missing, half of the middle's 0.3; answers are the last two tokens: +0.5 and +2
    assert box == ("box", "85.0", "50.0", "+1.250 ± 0.750", "+1.000 ± 0.500", "+0.200 ± 0.058", "33", "1.0")


def test_markdown_has_one_line_per_policy(outcome):
    lines = markdown(outcome).splitlines()
    assert len(lines) == 4 and all(line.count("|") == len(COLUMNS) + 1 for line in lines)


def test_no_error_is_made_up_for_a_single_token():
    assert mean_and_error(torch.tensor([1.0])) == "n/a"


@pytest.mark.parametrize("text", ["box", "box:int8", "q2:float32"])
def test_policies_are_named_as_they_are_given(text):
    assert label(parse_policy(text)) == text


def test_wrong_policies_and_settings_are_refused(capsys):
    assert parse_policy("mean") == Policy("mean", torch.bfloat16)
    with pytest.raises(argparse.ArgumentTypeError, match="minmax"):
        parse_policy("bex:int4")
    assert main(["--budget", "64"]) == 2
    assert main(["--budget", "100"]) == 2
    assert "leaves no hot slot" in " ".join(capsys.readouterr().err.split())
