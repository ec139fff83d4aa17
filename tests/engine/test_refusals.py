"""What OasisKV cannot serve stops the start, with one message: the value, what is allowed, and the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ENGINE, engine, prompt

import oasiskv
from oasiskv import SettingsError
from oasiskv.cli.main import known_error


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the configuration, but no weights, of models that are not supported."""
    from transformers import BloomConfig, DeepseekV2Config, WhisperConfig

    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    configs = {
        "mla": DeepseekV2Config(
            **small,
            architectures=["DeepseekV2ForCausalLM"],
            num_key_value_heads=2,
            kv_lora_rank=16,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        "alibi": BloomConfig(
            vocab_size=512, hidden_size=64, n_layer=1, n_head=2, architectures=["BloomForCausalLM"], seq_length=4096
        ),
        "encoder-decoder": WhisperConfig(architectures=["WhisperForConditionalGeneration"], d_model=32),
    }
    folders = {}
    for name, config in configs.items():
        folders[name] = tmp_path_factory.mktemp("refused") / name
        config.save_pretrained(folders[name])
    return folders


def refusal(model: Path, settings: dict[str, Any] | None = None, **vllm: Any) -> str:
    """The one message with which the engine's start ends."""
    with pytest.raises(Exception) as caught, engine(model, vllm=vllm, **(settings or {})):  # noqa: PT011
        pass
    known = known_error(caught.value)
    assert known is not None, f"not a refusal of ours: {caught.value!r}"
    return str(known)


# --- settings: before anything heavy starts


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"budget_tokens": 64}, "budget_tokens=64 .*sink_tokens=16.*window_tokens=64.*allowed is more than 80.*raise"),
        ({"budget_token": 512}, "unknown setting budget_token=512; did you mean budget_tokens?"),
        ({"residency": "sparse"}, "residency='sparse' is not allowed: .*'auto', 'dense', 'in_place' or 'bounded'"),
        ({"fetch_cap": 2}, "fetch_cap=2 is not allowed"),
    ],
)
def test_a_wrong_setting_is_refused_by_engine_args(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        oasiskv.engine_args(**settings)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"budget_tokens": 64}, "budget_tokens=64 leaves no room for hot slots"),
        ({"budget_token": 512}, "unknown setting budget_token=512; did you mean budget_tokens?"),
    ],
)
def test_a_wrong_setting_is_refused_in_vllms_own_configuration(
    tiny_llama: Path, extra: dict[str, Any], told: str
) -> None:
    from vllm import LLM

    transfer = {"kv_connector": "OasisConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        LLM(str(tiny_llama), **ENGINE, kv_transfer_config=transfer)
    assert told in str(known_error(caught.value))
    assert str(caught.value).count(told) == 1


# --- what the engine's configuration says


@pytest.mark.parametrize(
    ("settings", "vllm", "told"),
    [
        ({}, {"block_size": 16}, ["block_size=16 is not allowed", "multiples of 32", "--block-size 32"]),
        ({}, {"block_size": 48}, ["block_size=48 is not allowed", "multiples of 32", "--block-size 32"]),
        ({}, {"block_size": 128}, ["budget_tokens=256 leaves no hot slot", "block_size=128", "384 or more", "raise"]),
        (
            {"host_gib": 0.0001},
            {},
            ["host_gib=0.0001", "max_model_len=2048", "or more", "raise host_gib or lower --max-model-len"],
        ),
        (
            {"residency": "in_place"},
            {"num_gpu_blocks_override": 66},
            ["device pool of 66 blocks", "needs 64", "lower --max-model-len"],
        ),
        ({}, {"pipeline_parallel_size": 2}, ["pipeline parallelism", "without OasisKV"]),
    ],
    ids=["block 16", "block 48", "budget in blocks", "host pool", "device pool", "pipeline parallel"],
)
def test_a_configuration_that_cannot_work_is_refused(
    tiny_llama: Path, settings: dict[str, Any], vllm: dict[str, Any], told: list[str]
) -> None:
    message = refusal(tiny_llama, settings, **vllm)
    assert all(part in message for part in told), message
    assert message.startswith("OasisKV") and "\n" not in message


def test_another_connector_beside_ours_is_refused(tiny_llama: Path) -> None:
    from vllm import LLM

    ours = oasiskv.engine_args()["kv_transfer_config"]
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [ours, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]
        },
    }
    with pytest.raises(Exception) as caught:  # noqa: PT011
        LLM(str(tiny_llama), **ENGINE, kv_transfer_config=both)
    message = str(known_error(caught.value))
    assert "OasisConnector inside MultiConnector is not supported" in message and "only kv_connector" in message


# --- models


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ("mla", "multi-head latent attention (MLA)"),
        pytest.param("encoder-decoder", "an encoder-decoder model", marks=pytest.mark.slow),
        ("alibi", "ALiBi"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_with_the_reason(
    shapes: dict[str, Path], shape: str, told: str
) -> None:
    message = refusal(shapes[shape], load_format="dummy", skip_tokenizer_init=True, max_model_len=256)
    assert told in message and message.startswith("OasisKV")


def test_a_pooling_model_is_refused(tiny_llama: Path) -> None:
    assert "a pooling model" in refusal(tiny_llama, runner="pooling")


# --- one request


@pytest.mark.parametrize("budget", [0, 96, 257, "many", 128.0])
def test_a_budget_of_a_requests_own_that_cannot_be_used_is_refused(tiny_llama: Path, budget: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with engine(tiny_llama) as e:
        with pytest.raises(VLLMValidationError, match="oasis_budget_tokens"):
            e.submit(prompt(10), max_tokens=1, extra_args={"oasis_budget_tokens": budget})
        e.submit(prompt(10), max_tokens=1, extra_args={"oasis_budget_tokens": 128})
        assert len(e.run()) == 1


# --- what the user sees


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_command_line_ends_with_one_line_and_status_2(tiny_llama: Path) -> None:
    """Also where only vLLM's configuration can tell."""
    done = run(
        sys.executable, "-m", "oasiskv.cli.main", "serve", str(tiny_llama), "--block-size", "48", "--enforce-eager"
    )
    assert done.returncode == 2, done.stderr[-2000:]
    told = [line for line in done.stderr.splitlines() if "oasiskv: error:" in line]
    assert len(told) == 1 and "block_size=48 is not allowed" in told[0] and "use --block-size 32" in told[0]
    assert "Traceback" not in done.stderr


def test_what_only_the_engine_process_can_tell_reaches_the_user_too(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The device pool is measured in the engine's own process; its message is in what the user sees last."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    arguments = ENGINE | {"num_gpu_blocks_override": 66}
    with pytest.raises(RuntimeError):
        LLM(str(tiny_llama), **arguments, **oasiskv.engine_args(budget_tokens=256, residency="in_place"))
    shown = "".join(capfd.readouterr())
    assert "OasisKV: the device pool of 66 blocks keeps" in shown[-6000:]
