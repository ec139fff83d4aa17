"""That vLLM must load the plug-in and choose a backend that it stands in for; what is said of a model."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from facts import ERROR, OK, WARNING, answering, failing

from oasiskv.doctor import plugin
from oasiskv.doctor.finding import Level


def entry(value: str) -> EntryPoint:
    return EntryPoint("oasiskv", value, plugin.GROUP)


def test_the_entry_point_must_be_there_and_ours() -> None:
    another = EntryPoint("other", "other:register", plugin.GROUP)
    assert plugin.entry_point([another, entry(plugin.ENTRY)]).level is OK
    assert plugin.entry_point([another]).level is ERROR
    assert plugin.entry_point([entry("old:register"), entry(plugin.ENTRY)]).level is ERROR


@pytest.mark.parametrize(
    ("value", "level"), [(None, OK), ("oasiskv", OK), ("a,oasiskv", OK), ("a", ERROR), ("", ERROR)]
)
def test_vllm_plugins_must_not_leave_us_out(value: str | None, level: Level) -> None:
    assert plugin.allowed({} if value is None else {"VLLM_PLUGINS": value}).level is level


def test_the_fix_for_vllm_plugins_keeps_what_the_user_had() -> None:
    assert "VLLM_PLUGINS=a,b,oasiskv" in plugin.allowed({"VLLM_PLUGINS": "a,b"}).fix
    assert "VLLM_PLUGINS=oasiskv" in plugin.allowed({"VLLM_PLUGINS": ""}).fix


def test_a_plug_in_that_vllm_does_not_load_or_that_fails_is_an_error() -> None:
    assert plugin.registered(answering("plugin", loaded=True)).level is OK
    assert plugin.registered(answering("plugin", loaded=False)).level is ERROR
    found = plugin.registered(failing("plugin", "ImportError: no KVCacheSpecRegistry"))
    assert found.level is ERROR
    assert "no KVCacheSpecRegistry" in found.text


def test_the_backend_must_be_one_that_ours_stands_in_for() -> None:
    cpu = {"platform": "CpuPlatform", "device": "cpu", "name": "cpu", "backend": "CPU_ATTN", "isa": {"bfloat16": "amx"}}
    found = plugin.backend(answering("backend", **cpu, path="oasiskv.vllm_plugin.backend_cpu.OasisCPUBackend"))
    assert found.level is OK
    assert "CPU_ATTN" in found.text
    assert "amx for bfloat16" in found.text
    assert plugin.backend(answering("backend", **cpu, path="another.Backend")).level is ERROR


def test_a_gpu_is_an_error_with_the_reason() -> None:
    gpu = {"platform": "CudaPlatform", "device": "cuda", "name": "H200", "backend": "FLASH_ATTN", "path": "vllm.x"}
    found = plugin.backend(answering("backend", **gpu))
    assert found.level is ERROR
    assert "FLASH_ATTN on H200" in found.text
    assert "CPUs only" in found.text


def test_no_device_is_an_error() -> None:
    found = plugin.backend(answering("backend", platform="UnspecifiedPlatform", device="", name=""))
    assert found.level is ERROR


def test_a_configuration_that_vllm_refuses_is_an_error() -> None:
    assert plugin.engine(answering("engine", runner="V1", block_size=32), {}).level is OK
    refused = failing("engine", "Model Runner V2 requires Triton.")
    found = plugin.engine(refused, {"PATH": "x", "VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert found.level is ERROR
    assert "Model Runner V2 requires Triton." in found.text
    assert found.fix.endswith("try without: VLLM_USE_V2_MODEL_RUNNER")


def test_a_model_without_full_attention_is_a_warning_and_a_refused_one_an_error() -> None:
    facts = {"architecture": "A", "layers": 4, "context": 1024, "dtype": "bfloat16", "token_bytes": 1024}
    found = plugin.model(answering("model", **facts, full_layers=3), "m")
    assert found.level is OK
    assert "3 of 4 layers" in found.text
    assert "1,024 bytes per token (bfloat16), 1 MiB for a context of 1,024" in found.text
    assert plugin.model(answering("model", **facts, full_layers=0), "m").level is WARNING
    assert plugin.model(failing("model", "OasisKV does not support multi-head latent attention"), "m").level is ERROR
    assert "nothing is fetched here" in plugin.model(failing("model", "OSError: offline"), "m").fix
