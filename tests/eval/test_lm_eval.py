"""Tasks of lm-eval: the same samples for both engines, compared as pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oasiskv.eval import lm_eval as command
from oasiskv.eval.lm_eval_scores import Comparison, Score, compare, scores_of, table

TASK = """
task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: {words}, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [" "]}}
"""
WORDS = 12
ENGINE = ["--block-size", "32", "--max-model-len", "1024", "--num-gpu-blocks-override", "200", "--enforce-eager"]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` keeps lands in the test's folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def write_task(folder: Path, samples: list[dict[str, str]]) -> Path:
    """A task with local data, in a folder for ``--include-path``."""
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (folder / "local.yaml").write_text(TASK.format(data=data, words=WORDS))
    return folder


def dense_answers(model_folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What the model writes after each prompt, by Hugging Face's own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    answers = []
    with torch.no_grad():
        for prompt in prompts:
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=WORDS, do_sample=False, eos_token_id=None)
            answers.append(ids[0, len(prompt) :].tolist())
    return answers


def words(ids: list[int]) -> str:
    return " ".join(f"t{i}" for i in ids)


@pytest.mark.usefixtures("hub_cache")
def test_a_local_task_runs_with_both_engines_on_the_same_samples(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 512, (8, 400), generator=generator).tolist()
    answers = dense_answers(tiny_llama, prompts)
    samples = [
        {"text": words(prompt), "answer": words(answer)}
        for prompt, answer in zip(prompts, answers, strict=True)
        if min(answer) >= 4  # no end of text within
    ]
    assert len(samples) >= 4
    report = tmp_path / "report.json"
    status = command.main(
        [
            str(tiny_llama), "--tasks", "local_words", "--include-path", str(write_task(tmp_path / "tasks", samples)),
            "--json", str(report), "--budget-tokens", "128", "--residency", "bounded", "--dtype", "float32", *ENGINE,
        ]
    )  # fmt: skip
    assert status == 0
    found = json.loads(report.read_text())
    assert found["settings"] == {"budget_tokens": "128", "residency": "bounded"}
    assert found["engine_options"] == ["--dtype", "float32", *ENGINE]
    assert found["made_with"]["versions"]["lm-eval"]
    (row,) = [Comparison(**row) for row in found["rows"]]
    assert (row.task, row.metric, row.samples, row.generates) == ("local_words", "exact_match", len(samples), True)
    assert row.dense == 1.0, "stock vLLM writes what Hugging Face's model writes"
    assert row.paired and row.up == 0
    assert row.down > 0, "a budget of 128 of 400 random words shows"
    assert row.oasis == pytest.approx(1 - row.down / row.samples)
    assert "local_words" in capsys.readouterr().out


@pytest.mark.usefixtures("hub_cache")
def test_data_out_of_reach_is_named_with_the_way_out(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    task = TASK.format(data="x", words=1).replace("dataset_path: json", "dataset_path: nobody/has-this")
    (tasks / "far.yaml").write_text(task)
    with pytest.raises(command.TaskError, match=r"local_words: the data is out of reach.*HF_HOME.*data_files"):
        command.load_tasks(["local_words"], str(tasks), {})


def test_an_unknown_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import tasks

    real = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: real(**{**options, "include_defaults": False}))
    with pytest.raises(command.TaskError, match="nothing: no such task"):
        command.load_tasks(["nothing"], str(tmp_path), {})


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m"], "--tasks"),
        (["--tasks", "gsm8k"], "the model must come first"),
        (["m", "--tasks", "gsm8k", "--budget-tokens", "10"], "budget_tokens=10"),
        (["m", "--tasks", "gsm8k", "--metadata", "{"], "--metadata"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_missing_lm_eval_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main(["m", "--tasks", "gsm8k"]) == 2
    assert capsys.readouterr().err == "oasiskv: error: lm-eval is not installed: pip install 'oasiskv[eval]'\n"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--tasks", "--limit", "--include-path", "--json", "--budget-tokens"))


# --- the comparison


def results(values: list[float], *, value: float | None = None, metric: str = "acc", kind: str = "generate_until"):
    """As lm-eval gives them, for one task `t`."""
    mean = sum(values) / len(values) if value is None else value
    return {
        "results": {"t": {"alias": "t", f"{metric},none": mean, f"{metric}_stderr,none": 0.03, "sample_len": 4}},
        "configs": {"t": {"output_type": kind}},
        "samples": {"t": [{"filter": "none", "prompt_hash": f"p{i}", metric: v} for i, v in enumerate(values)]},
    }


def compared(dense: dict, oasis: dict) -> Comparison:
    (row,) = compare(scores_of(dense), scores_of(oasis))
    return row


def test_the_interval_comes_from_the_differences_of_samples() -> None:
    row = compared(results([1, 1, 1, 0]), results([1, 0, 1, 0]))
    assert (row.samples, row.dense, row.oasis, row.paired, row.up, row.down) == (4, 0.75, 0.5, True, 0, 1)
    # Differences 0 -1 0 0. Of four draws 3 or more are -1 in 5.1 %, all 4 in 0.4 %, none in 32 %: the 2.5 % and 97.5 %
    # quantiles of their mean are -0.75 and 0, moved away from -0.25 by sqrt(4 / 3) and Student's 3.1824 over 1.96.
    assert row.difference == -0.25
    wider = (4 / 3) ** 0.5 * 3.1824 / 1.9600
    assert row.low == pytest.approx(-0.25 - 0.5 * wider, abs=1e-3)
    assert row.high == pytest.approx(-0.25 + 0.25 * wider, abs=1e-3)


def test_other_samples_are_not_paired() -> None:
    other = results([1, 0, 1, 0])
    other["samples"]["t"][2]["prompt_hash"] = "another prompt"
    row = compared(results([1, 1, 1, 0]), other)
    assert not row.paired and (row.up, row.down) == (0, 0)
    assert row.high == pytest.approx(-0.25 + 1.96 * 2**0.5 * 0.03, abs=1e-4)


def test_what_is_not_a_mean_of_samples_is_not_paired() -> None:
    row = compared(results([1, 2, 3], value=7.5), results([1, 2, 3], value=7.0))
    assert not row.paired and row.difference == -0.5


def test_samples_that_a_metric_does_not_concern_are_left_out() -> None:
    """RULER: one metric for each length, -1 for samples of another."""
    row = compared(results([-1, 1, 1, -1], value=1.0), results([-1, 0, 1, -1], value=0.5))
    assert (row.samples, row.paired, row.down) == (2, True, 1)


def test_a_group_has_its_score_but_no_pairs() -> None:
    both = []
    for value in (0.8, 0.6):
        found = results([1, 0])
        found["results"]["g"] = {"alias": "g", "acc,none": value, "acc_stderr,none": "N/A"}
        found["group_subtasks"] = {"g": ["t"]}
        both.append(scores_of(found))
    group = compare(*both)[1]
    assert (group.task, group.paired, group.low, group.dense_stderr) == ("g", False, None, None)
    assert group.difference == pytest.approx(-0.2)


def test_tasks_that_only_read_are_named_below_the_table() -> None:
    row = compared(results([1, 0], kind="multiple_choice"), results([1, 0], kind="multiple_choice"))
    assert "Say nothing about OasisKV: t." in table([row], "").notes
    assert "Say nothing" not in table([compared(results([1, 0]), results([1, 0]))], "").notes


def test_the_table_shows_errors_interval_and_changes() -> None:
    dense = {("t", "acc,none"): Score(0.75, 0.25, (1.0, 1.0, 1.0, 0.0), ("a", "b", "c", "d"))}
    oasis = {("t", "acc,none"): Score(0.5, None, (1.0, 0.0, 1.0, 0.0), ("a", "b", "c", "d"))}
    (cells,) = table(compare(dense, oasis), "").rows
    assert cells == ("t", "acc", "4", "0.750 ± 0.250", "0.500", "-0.250 (-1.187 to +0.219)", "0/1")
