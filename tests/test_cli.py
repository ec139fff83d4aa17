"""The command line: what is ours, what is vLLM's, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import oasiskv
from oasiskv.cli import generate, main, options, serve
from oasiskv.cli.options import UsageError, has_flag, split, split_model
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.models import FetchError


@pytest.fixture
def smollm2_fetched(monkeypatch: pytest.MonkeyPatch) -> str:
    """The known model lies in the cache already."""
    monkeypatch.setattr(serve, "resolve_model", lambda name: "/cache/smollm2" if name == "smollm2" else name)
    return "/cache/smollm2"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of the console script."""
    monkeypatch.setattr("sys.argv", ["oasiskv", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def connector_config(arguments: list[str]) -> dict[str, object]:
    return json.loads(arguments[arguments.index("--kv-transfer-config") + 1])  # type: ignore[no-any-return]


# --- cutting the command line


def test_our_settings_are_taken_out_and_the_rest_keeps_its_order() -> None:
    line = ["m", "--port", "8000", "--budget-tokens", "512", "-tp", "2", "--scorer=mean", "--eager", "-cc.mode", "0"]
    ours, rest = split(line)
    assert ours == {"budget_tokens": "512", "scorer": "mean"}
    assert rest == ["m", "--port", "8000", "-tp", "2", "--eager", "-cc.mode", "0"]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_an_option_in_both_spellings(name: str) -> None:
    assert split([f"--{name.replace('_', '-')}", "1"]) == ({name: "1"}, [])
    assert split([f"--{name}=1"]) == ({name: "1"}, [])


def test_an_abbreviated_setting_is_not_ours() -> None:
    assert split(["--budget", "5"]) == ({}, ["--budget", "5"])


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="--budget-tokens"):
        split(["m", "--budget-tokens"])


def test_a_refused_option_that_resembles_a_setting_gives_a_hint() -> None:
    assert options.did_you_mean(["serve", "m", "--budget-token", "5"]) == "did you mean --budget-tokens?"
    assert options.did_you_mean(["serve", "m", "--no-such-thing"]) is None


@pytest.mark.parametrize("given", ["--a-b", "--a_b", "--a-b=1", "--a_b=x.y", "--a-b.key"])
def test_a_flag_is_seen_in_every_spelling_vllm_takes(given: str) -> None:
    assert has_flag(["x", given], "--a-b")
    assert not has_flag(["--a-bc", "a-b"], "--a-b")


def test_the_model_comes_first() -> None:
    assert split_model(["m", "--port", "1"], "serve") == ("m", ["--port", "1"])
    for rest in ([], ["--port", "1", "m"]):
        with pytest.raises(UsageError, match="oasiskv serve MODEL"):
            split_model(rest, "serve")


@pytest.mark.parametrize("flag", ["--kv-transfer-config", "--kv_transfer_config={}", "--kv-transfer-config.kv_role"])
def test_another_connector_is_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be given.*not supported"):
        split_model(["m", flag], "serve")


# --- oasiskv serve


def test_serve_is_vllm_serve_with_the_connector() -> None:
    call = serve.vllm_arguments(["org/model", "--budget-tokens", "512", "--block-size", "32", "--port", "8000"])
    assert call[:-2] == ["serve", "org/model", "--block-size", "32", "--port", "8000"]
    assert connector_config(call) == oasiskv.engine_args(budget_tokens=512)["kv_transfer_config"]


def test_settings_may_stand_before_the_model() -> None:
    assert serve.vllm_arguments(["--budget-tokens", "512", "org/model"])[:2] == ["serve", "org/model"]


def test_a_known_model_is_served_under_the_name_the_user_typed(smollm2_fetched: str) -> None:
    call = serve.vllm_arguments(["smollm2"])
    assert call[:4] == ["serve", smollm2_fetched, "--served-model-name", "smollm2"]


@pytest.mark.parametrize("given", [["--served-model-name", "x"], ["--served_model_name=x"]])
def test_a_served_name_of_the_user_stays(smollm2_fetched: str, given: list[str]) -> None:
    assert serve.vllm_arguments(["smollm2", *given])[:-2] == ["serve", smollm2_fetched, *given]


def test_asking_for_vllms_help_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fetch(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(serve, "resolve_model", no_fetch)
    assert serve.vllm_arguments(["smollm2", "--help=all"])[:3] == ["serve", "smollm2", "--help=all"]


def test_a_wrong_setting_is_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(SettingsError, match="budget_tokens=10 "):
        serve.vllm_arguments(["smollm2", "--budget-tokens", "10"])


# --- oasiskv generate


def test_generate_keeps_engine_options_for_vllm() -> None:
    request = generate.parse(
        ["m", "--prompt", "a", "--prompt", "b", "--max-tokens", "7", "--block-size", "32", "--scorer", "mean"]
    )
    assert request == generate.Request(
        model="m",
        prompts=("a", "b"),
        max_tokens=7,
        temperature=0.0,
        raw=False,
        settings={"scorer": "mean"},
        vllm=("--block-size", "32"),
    )


def test_generate_without_a_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="--prompt"):
        generate.parse(["m"])


# --- the console script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m", "--budget-tokens", "10"], "budget_tokens=10 leaves no room"),
        (["serve", "m", "--scorer", "magic"], "scorer='magic' is not allowed"),
        (["serve", "--port", "1"], "the model must come first"),
        (["serve", "m", "--kv-transfer-config", "{}"], "--kv-transfer-config is set by OasisKV"),
        (["generate", "m"], "no prompt given"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("oasiskv: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_an_unknown_model_name_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "model", "fetch", "nothing") == 1
    assert "known are: smollm2" in capsys.readouterr().err


def test_a_missing_vllm_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise oasiskv.installed.InstallError("vLLM is not installed.")

    monkeypatch.setattr(serve, "check_vllm", missing)
    assert run(monkeypatch, "serve", "m") == 2
    assert capsys.readouterr().err == "oasiskv: error: vLLM is not installed.\n"


def test_a_refusal_inside_vllms_own_error_is_found() -> None:
    from pydantic import BaseModel, ValidationError, model_validator

    class Config(BaseModel):
        @model_validator(mode="after")
        def check(self) -> Config:
            raise SettingsError("OasisKV: block_size=24 is not allowed")

    with pytest.raises(ValidationError) as caught:
        Config()
    assert str(main.known_error(caught.value)) == "OasisKV: block_size=24 is not allowed"
    chained = RuntimeError("engine failed")
    chained.__cause__ = caught.value
    assert isinstance(main.known_error(chained), SettingsError)
    assert main.known_error(RuntimeError("another")) is None


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"oasiskv {oasiskv.__version__}\n"


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_shows_every_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in shown for name in Settings.model_fields)


def test_model_path_is_for_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(monkeypatch, "model", "path", "smollm2") == 1
    assert "oasiskv model fetch smollm2" in capsys.readouterr().err
    monkeypatch.setattr("oasiskv.models.is_fetched", lambda name: True)
    assert run(monkeypatch, "model", "path", "smollm2") == 0
    assert capsys.readouterr().out == f"{tmp_path}/oasiskv/models/smollm2\n"


@pytest.mark.slow
def test_no_setting_has_the_name_of_an_option_of_vllm() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    taken = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    assert not {f"--{name.replace('_', '-')}" for name in Settings.model_fields} & set(taken)


def test_fetch_error_is_not_a_setting_error() -> None:
    assert not issubclass(FetchError, SettingsError)
