"""`oasiskv doctor`: how checks are run and shown, and what it says of the machine it runs on. Each check: `doctor/`."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import oasiskv
from oasiskv.cli import doctor, main
from oasiskv.doctor.finding import Check, Finding, Level, Skipped, as_json, run_checks, worst
from oasiskv.doctor.fresh import Answers

OK, WARNING, ERROR = Level


# --- checks are run one by one


def test_a_check_that_breaks_is_an_error_and_the_next_one_runs() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("no cores")

    fine = Finding("cores", OK, "two")
    told: list[str] = []
    found = run_checks([Check("cores", "cores", broken), Check("cores", "threads", lambda: fine)], told.append)
    assert (found[0].topic, found[0].level, found[0].text) == ("cores", ERROR, "cores: no cores")
    assert "report" in found[0].fix
    assert found[1:] == [fine]
    assert told == ["cores", "threads"]


def test_a_check_that_cannot_say_anything_leaves_no_line() -> None:
    def silent() -> Finding:
        raise Skipped

    assert run_checks([Check("cores", "cores", silent)]) == []


def test_the_worst_finding_counts() -> None:
    def levels(*given: Level) -> list[Finding]:
        return [Finding("t", level, "") for level in given]

    assert worst([]) is OK
    assert worst(levels(OK, WARNING, OK)) is WARNING
    assert worst(levels(WARNING, ERROR, OK)) is ERROR


# --- the command


class Ran:
    """What a real run here says."""

    def __init__(self, status: int, shown: str, written: dict[str, Any]) -> None:
        self.status, self.shown, self.written = status, shown, written

    def text(self, topic: str) -> str:
        return "\n".join(finding["text"] for finding in self.written["findings"] if finding["topic"] == topic)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Ran:
    """The command on this machine, with a model."""
    target = tmp_path_factory.mktemp("doctor") / "findings.json"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as shown:
        patch.setenv("COLUMNS", "80")
        status = doctor.run(str(tiny_llama), str(target))
    return Ran(status, shown.getvalue(), json.loads(target.read_text()))


def test_this_machine_has_no_error(real: Ran) -> None:
    assert real.status == 0, real.shown
    assert "plug-in   OK" in real.shown


def test_this_machine_has_the_cpu_backend_with_ours_in_it(real: Ran) -> None:
    assert "CPU_ATTN with OasisKV in it" in real.text("plug-in")
    assert "active" in real.text("plug-in")
    assert "copies in memory" in real.text("links")


def test_the_models_configuration_is_read(real: Ran, tiny_llama: Path) -> None:
    # K and V of 3 layers with 2 KV heads, in bfloat16, which vLLM makes of float32 by itself.
    config = json.loads((tiny_llama / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert f"3 of 3 layers with full attention; their KV takes {2 * 3 * 2 * width * 2:,} bytes" in real.text("model")


def test_the_table_fits_80_columns_and_says_levels_in_words(real: Ran) -> None:
    assert max(map(len, real.shown.splitlines())) <= 80
    for finding in real.written["findings"]:
        assert f" {finding['level']} " in real.shown


def test_json_has_every_finding(real: Ran) -> None:
    assert set(real.written) == {"oasiskv", "status", "findings"}
    assert real.written["oasiskv"] == oasiskv.__version__
    assert real.written["status"] in ("OK", "warning")
    topics = {"software", "plug-in", "memory", "cores", "links", "optional", "model"}
    assert {finding["topic"] for finding in real.written["findings"]} == topics
    for finding in real.written["findings"]:
        assert set(finding) == {"topic", "level", "text", "fix"}
        assert finding["level"] in ("OK", "warning", "error")
        assert finding["fix"] or finding["level"] == "OK"


def test_every_error_and_warning_is_shown_with_its_fix() -> None:
    console = Console(width=80, file=StringIO())
    doctor.show([Finding("a", OK, "fine"), Finding("b", ERROR, "[bold] wrong", "do this")], console)
    shown = console.file.getvalue()
    assert "b  error  [bold] wrong" in shown
    assert "-> do this" in shown
    assert "errors: 1, warnings: 0" in shown


@pytest.mark.parametrize(("level", "status"), [(OK, 0), (WARNING, 0), (ERROR, 1)])
def test_only_an_error_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: Level, status: int
) -> None:
    found = Finding("cores", level, "text", "fix")
    monkeypatch.setattr(doctor, "checks", lambda environment, model: [Check("cores", "cores", lambda: found)])
    monkeypatch.setattr("sys.argv", ["oasiskv", "doctor", "--json", "-"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert int(end.value.code or 0) == status
    assert json.loads(capsys.readouterr().out) == as_json([found])


def test_json_into_a_folder_that_is_not_there_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["oasiskv", "doctor", "--json", "/no/such/folder/x.json"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_known_model_that_is_not_fetched_is_not_fetched_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "ask", lambda model: pytest.fail(f"asked for {model}"))
    (check,) = [check for check in doctor.checks({}, "smollm2") if check.topic == "model"]
    found = check.run()
    assert (found.level, found.fix) == (WARNING, "oasiskv model fetch smollm2")


def test_on_a_gpu_nothing_is_said_of_the_pool_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask", lambda model: Answers([{"section": "backend", "facts": {"device": "cuda"}}]))
    (check,) = [check for check in doctor.checks({}) if check.name == "the KV pool"]
    assert run_checks([check]) == []
