"""``oasiskv plan``: the command line, what it refuses, what it prints, and its check against a benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli import main, model_config, plan_case
from oasiskv.cli.plan_case import device_of, is_here, load_of, load_shape, parse
from oasiskv.core import probe_machine
from oasiskv.core.devices import GB, GIB, PRESETS, TERA, Device
from oasiskv.core.scorers import Scorer, make_scorer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Folder with the configuration of a Llama of 8 B parameters, and nothing else."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "llama")


@pytest.fixture(autouse=True)
def not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`here` is the CPU preset: no test depends on how fast this machine is."""

    def measure(scorer: Scorer, group: int) -> Device:
        return replace(probe_machine.unmeasured(), name="this machine, measured")

    monkeypatch.setattr(probe_machine, "measure", measure)
    monkeypatch.setattr(probe_machine, "usable_memory", lambda: 64 * GIB)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of ``oasiskv plan``."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["oasiskv", "plan", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def results(path: Path, model: str, **cell: Any) -> str:
    """A file as ``oasiskv bench`` writes it, of one cell: the demo's load and pools."""

    def spread(value: float) -> dict[str, float]:
        return {"median": value, "least": value, "most": value}

    def row(name: str, running: int, speed: float) -> dict[str, Any]:
        figures = {"throughput": 4.0, "decode_throughput": speed, "step_ms": 50.0, "running": running}
        return {"row": name, **{figure: spread(value) for figure, value in figures.items()}}

    whole = {"workload": "long-context", "prompt_tokens": 30_000, "output_tokens": 100, "requests": 8}
    whole |= {"concurrency": 8, "budget_tokens": 2048, "pool_bytes": 12 * GIB, "host_bytes": 40 * GIB}
    whole["rows"] = [row("dense", 3, 40.0), row("oasis", 8, 60.0), row("dense_plus_host", 8, 50.0), row("limit", 8, 90)]
    path.write_text(json.dumps({"kind": "bench", "model": model, "cells": [{**whole, **cell}]}))
    return str(path)


# --- what it prints


def test_a_plan_for_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str) -> None:
    line = [model, "--device", "h100", "--prompt", "32000", "--output", "1000", "--scorer", "box"]
    assert run(monkeypatch, *line, "--requests-per-second", "2") == 0
    shown = capsys.readouterr().out
    for text in ("KV 128 KiB a token", "129 blocks", "It pays", "host pool", "--fetch-cap", "nodes for 2 requests/s"):
        assert text in shown


def test_all_numbers_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "plan.json"
    line = [model, "--device", "a100", "--budget-tokens", "1024", "--json", str(file), "--requests-per-second", "1"]
    assert run(monkeypatch, *line) == 0
    found = json.loads(file.read_text())
    assert found["kind"] == "plan" and found["pays"] is True
    assert found["case"]["settings"]["budget_tokens"] == 1024
    assert found["oasis"]["holding"]["held_blocks"] == 65
    assert found["ratio"] == found["oasis"]["tokens_per_second"] / found["dense"]["tokens_per_second"]
    assert set(found["fleet"]) == {"decode_dense", "decode_oasis", "prefill"}


def test_without_a_device_this_machine_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    assert run(monkeypatch, model, "--pool-gib", "6", "--prompt", "20000") == 0
    shown = capsys.readouterr().out
    assert "this machine, measured" in shown
    assert "Host and device share memory here" in shown


def test_help_shows_options_and_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--device", "--check", "--requests-per-second", "--budget-tokens"))


# --- the command line


def test_a_device_in_numbers_needs_no_name(model: str) -> None:
    numbers = ["--memory-gib", "40", "--bandwidth-gbs", "1500", "--tflops", "300", "--link-gbs", "25"]
    args = parse([model, *numbers, "--overhead-ms", "0", "--attained", "0.9"]).args
    assert not is_here(args)
    device = device_of(args)
    assert (device.memory_bytes, device.memory_bandwidth, device.flops) == (40 * GIB, 1500 * GB, 300 * TERA)
    assert (device.link_bandwidth, device.overhead, device.attained) == (25 * GB, 0.0, 0.9)


def test_a_number_replaces_the_presets(model: str) -> None:
    args = parse([model, "--device", "H100", "--link-gbs", "25", "--devices", "2"]).args
    assert device_of(args) == replace(PRESETS["h100"], link_bandwidth=25 * GB).times(2)
    assert is_here(parse([model, "--tflops", "1"]).args)


def test_the_default_load_fits_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 8192}))
    args = parse([str(tmp_path)]).args
    load = load_of(args, load_shape(str(tmp_path), args))
    assert (load.prompt_tokens, load.output_tokens, load.concurrency) == (8192 - 512, 512, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--prompt", "131072", "--output", "1"], "is longer than the 131072 of"),
        (["--pool-gib", "1", "--prompt", "20000"], "does not hold one request"),
        (["--budget-tokens", "64"], "leaves no room for hot slots"),
        (["--budget-tokens", "96", "--block-size", "32"], "no hot slot"),
        (["--block-size", "24"], "block_size=24 is not allowed"),
        (["--scorer", "magic"], "scorer='magic' is not allowed"),
        (["--device", "h900"], "device='h900' is not known: use here"),
        (["--device", "l40s", "--memory-gib", "10"], "leave no KV memory"),
        (["--device", "a100", "--link-gbs", "0"], "--link-gbs 0 is not allowed"),
        (["--attained", "3"], "attained=3 of the device"),
        (["--concurrency", "0"], "concurrency=0 is not allowed"),
        (["--acceptance", "2"], "acceptance=2 is not allowed"),
        (["--requests-per-second", "0"], "--requests-per-second 0 is not allowed"),
        (["--device", "h100", "--host-gib", "0.5", "--residency", "bounded"], "--host-gib 2.3"),
        (["--budget-token", "512"], "did you mean --budget-tokens?"),
        (["--nonsense"], "unknown option --nonsense"),
        (["--prompt", "many"], "--prompt: invalid int value: 'many'"),
        (["--prefill", "nowhere"], "invalid choice: 'nowhere'"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    line: list[str],
    message: str,
) -> None:
    def never(scorer: Scorer, group: int) -> Device:
        raise AssertionError("measured")

    monkeypatch.setattr(probe_machine, "measure", never)
    assert run(monkeypatch, model, *line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and err.startswith("oasiskv: error: ") and err.count("\n") == 1


def test_a_plan_without_a_model_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--device", "h100") == 2
    assert "oasiskv plan MODEL" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    assert run(monkeypatch, model, "--device", "h100", "--json", str(tmp_path)) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- where the configuration comes from


def test_a_file_a_folder_and_a_known_name_mean_the_same(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(model_config, "resolve_model", lambda name: model)
    for name in (model, f"{model}/config.json", "smollm2"):
        assert model_config.load_config(name) == CONFIG


@pytest.mark.parametrize("name", ["nothing", "./nothing", "/no/where", "a/b/c", "config.json", "no/file.json"])
def test_a_model_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(plan_case.UsageError, match=r"no model at .*give a folder.*smollm2"):
        model_config.load_config(name)


def test_a_hub_name_offline_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.utils

    def offline() -> None:
        raise OSError("offline mode")

    monkeypatch.setattr(huggingface_hub.utils, "get_session", offline)
    assert run(monkeypatch, "some-org/some-model", "--device", "h100") == 2
    err = capsys.readouterr().err
    assert "some-org/some-model could not be read from the hub (offline mode)" in err
    assert "give a folder that holds the model, or a config.json" in err


@pytest.mark.parametrize("text", ["not json", "[1]", "{}"])
def test_a_broken_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert run(monkeypatch, str(tmp_path), "--device", "h100") == 2
    assert "oasiskv: error: " in capsys.readouterr().err


def test_sizes_that_an_architecture_leaves_out_are_its_defaults(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    shape = load_shape(str(tmp_path), parse([str(tmp_path)]).args)
    assert (shape.layers, shape.sliding_layers, shape.sliding_window) == (5, 29, 1024)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)


# --- beside a benchmark


def test_predictions_stand_beside_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    file, written = results(tmp_path / "bench.json", model), tmp_path / "check.json"
    assert run(monkeypatch, "--check", file, "--device", "cpu", "--json", str(written)) == 0
    shown = capsys.readouterr().out
    assert "long-context: 30,000 + 100 tokens, 8 at once, budget 2,048" in shown
    (cell,) = json.loads(written.read_text())["cells"]
    lines = {line["row"]: line for line in cell["lines"]}
    # Dense: 12 GiB are 768 blocks of 128 x 128 KiB; 767 by 236 are 3. OasisKV: 3,072 blocks, an eighth for summaries;
    # (2,687 - 938) / 65 + 1 is 27, 8 are asked for.
    assert lines["dense"]["running"] == {"predicted": 3, "measured": 3}
    assert lines["oasis"]["running"] == {"predicted": 8, "measured": 8}
    assert lines["oasis"]["tokens_per_second"]["measured"] == 60.0
    assert lines["dense_plus_host"]["tokens_per_second"]["measured"] == 50.0
    assert cell["ratio"]["measured"] == 1.5
    predicted = [lines[row]["tokens_per_second"]["predicted"] for row in ("oasis", "dense")]
    assert cell["ratio"]["predicted"] == pytest.approx(predicted[0] / predicted[1])
    for text in ("3 | 3", "8 | 8", "| 60.0", "| 1.50"):
        assert text in shown


def test_a_cell_that_cannot_be_planned_says_so_and_a_stretched_one_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    file = results(tmp_path / "bench.json", model, pool_bytes=GIB)
    assert run(monkeypatch, "--check", file, "--device", "cpu") == 0
    assert "no prediction: a KV pool of 1.000 GiB" in capsys.readouterr().out
    file = results(tmp_path / "bench.json", model, prompt_tokens=140_000, pool_bytes=30 * GIB, host_bytes=200 * GIB)
    assert run(monkeypatch, "--check", file, "--device", "cpu") == 0
    assert "no prediction" not in capsys.readouterr().out


def test_the_last_turn_of_a_conversation_is_planned_with_the_cells_own_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    own = {"turns": 2, "context": 31_000, "settings": {"budget_tokens": 1024}, "budget_tokens": 1024}
    file = results(tmp_path / "bench.json", model, **own)
    assert run(monkeypatch, "--check", file, "--device", "cpu") == 0
    assert "30,900 + 100 tokens, 8 at once, budget 1,024" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ('{"kind": "plan"}', "was not written by oasiskv bench"),
        ('{"kind": "bench", "model": "m", "cells": []}', "no model or no cells"),
        ('{"kind": "bench", "model": "m", "cells": [{"workload": "x"}]}', "a cell lacks prompt_tokens"),
    ],
)
def test_a_wrong_file_of_results_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str | None,
    message: str,
) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    assert run(monkeypatch, "--check", str(tmp_path / "r.json")) == 2
    err = capsys.readouterr().err
    assert message in err and "oasiskv bench --json" in err and err.count("\n") == 1


# --- measuring this machine


def test_every_rate_of_this_machine_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    sizes = {"MATRICES": 2, "WIDTH": 64, "CONTEXT": 64, "LAYERS": 1, "PAGES": 8, "SECONDS_EACH": 0.01}
    for name, small in sizes.items():
        monkeypatch.setattr(probe_machine, name, small)
    scorer = make_scorer("q2", 64, torch.bfloat16)
    rates = [probe_machine.weight_rate(), probe_machine.matrix_rate(), probe_machine.copy_rate()]
    rates += [probe_machine.attention_rate(64, 3), probe_machine.scoring_rate(scorer, 3)]
    assert all(rate > 0 for rate in rates)
