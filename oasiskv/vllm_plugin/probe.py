"""What vLLM makes of this machine, for ``oasiskv doctor``: facts, no judgement.

To be called in a Python of its own, in this order: vLLM changes the environment as it configures itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

Facts = dict[str, Any]
CHILD = (
    "import json, torch; from oasiskv.core.pipeline import free_core;"
    "print(json.dumps({'threads': torch.get_num_threads(), 'free_core': free_core()}))"
)


def plugin() -> Facts:
    """Whether vLLM loads the plug-in by itself, and whether it runs when it is called."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    from oasiskv.vllm_plugin import register
    from oasiskv.vllm_plugin.switch import CONNECTOR

    load_general_plugins()
    loaded = CONNECTOR in KVConnectorFactory._registry
    register()
    KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    return {"loaded": loaded}


def backend() -> Facts:
    """The attention backend that vLLM chooses for a usual bfloat16 model here."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    facts = {
        "platform": type(current_platform).__name__,
        "device": current_platform.device_type,
        "name": current_platform.get_device_name() if current_platform.device_type else "",
    }
    if not current_platform.device_type:
        return facts
    usual = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=32)
    path = current_platform.get_attn_backend_cls(None, usual, num_heads=32)
    facts["path"] = path
    facts["backend"] = next((b.name for b in AttentionBackendEnum if _path_of(b) == path), path)
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        facts["isa"] = {
            str(t).removeprefix("torch."): _get_attn_isa(t, 32, 128) for t in (torch.bfloat16, torch.float32)
        }
    return facts


def _path_of(backend: Any) -> str | None:
    """A backend's class; None for a name that nobody has registered a class for."""
    try:
        return str(backend.get_path())
    except ValueError:
        return None


def engine() -> Facts:
    """vLLM's configuration with OasisKV on and no model; the memory that it will count with, bytes."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    config = VllmConfig(kv_transfer_config=_switched_on())
    facts = {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "block_size": config.cache_config.block_size,
        "utilization": config.cache_config.gpu_memory_utilization,
    }
    if current_platform.is_cpu():
        memory = get_memory_node_info(max(get_allowed_cpu_list()[0].numa_node, 0))
        facts |= {"node_total": memory.total_memory, "node_available": memory.available_memory}
    return facts


def threads() -> Facts:
    """The threads of one worker as vLLM will start it, and whether a core is then left for our pipeline."""
    from vllm.config import VllmConfig
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    config = VllmConfig(
        kv_transfer_config=_switched_on()
    )  # puts what vLLM preloads into LD_PRELOAD, on which the binding depends
    facts: Facts = {"preloaded": os.environ.get("LD_PRELOAD", ""), "cores": [], "reserved": []}
    child = [sys.executable, "-P", "-c", CHILD]
    if config.parallel_config.distributed_executor_backend != "mp":
        return facts | json.loads(subprocess.check_output(child))
    manager = OMPProcessManager(config)
    if manager.cpu_lists:
        facts |= {"cores": list(manager.cpu_lists[0]), "reserved": list(manager.reserved_cpu_list)}
    with manager.configure_omp_envs(rank=0, local_rank=0):
        return facts | json.loads(subprocess.check_output(child))


def model(name: str) -> Facts:
    """A model's configuration under all rules of ``validate``; no weights. Bytes are those of one token's KV."""
    from vllm import EngineArgs

    config = EngineArgs(model=name, kv_transfer_config=_switched_on()).create_engine_config()
    model, parallel = config.model_config, config.parallel_config
    layers = model.get_num_layers(parallel)
    kinds = getattr(model.hf_text_config, "layer_types", None)
    full = kinds.count("full_attention") if kinds else 0 if model.get_sliding_window() else layers
    return {
        "architecture": model.architecture,
        "layers": layers,
        "full_layers": full,
        "context": model.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
        "token_bytes": 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * full * model.dtype.itemsize,
    }


def _switched_on() -> Any:
    from vllm.config import KVTransferConfig

    import oasiskv

    return KVTransferConfig(**oasiskv.engine_args()["kv_transfer_config"])
