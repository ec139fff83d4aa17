"""What is refused when vLLM's configuration is built: one clear message, before any engine process starts."""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from oasiskv.core.geometry import Geometry
from oasiskv.core.settings import SettingsError
from oasiskv.vllm_plugin.switch import settings_of

DEFAULT_BLOCK_SIZE = 32
"""Ours where the user named none: finer blocks are chosen better than vLLM's CPU default of 128."""


def watch_config() -> None:
    """Have every ``VllmConfig`` checked as it is built. Without OasisKV switched on, nothing changes."""
    original = VllmConfig.__post_init__
    if getattr(original, "_oasiskv", False):
        return

    @functools.wraps(original)
    def checked(self: VllmConfig, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(self)
        if settings is not None:
            cache = self.cache_config
            if not cache.user_specified_block_size:
                cache.block_size = DEFAULT_BLOCK_SIZE
                cache.user_specified_block_size = True
        original(self, *args, **kwargs)
        if settings is not None:
            check(self)

    checked._oasiskv = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = checked  # type: ignore[method-assign]


def check(config: VllmConfig) -> None:
    """Refuse what OasisKV cannot serve.

    Raises:
        SettingsError: the value, what is allowed, and the fix.
    """
    settings = settings_of(config)
    model = config.model_config
    if settings is None or model is None:
        return
    Geometry.of(settings, config.cache_config.block_size)
    if current_platform.is_cpu() and config.cache_config.block_size % 32:
        raise SettingsError(
            f"OasisKV: block_size={config.cache_config.block_size} is not allowed: the CPU attention backend takes "
            "multiples of 32; use --block-size 32"
        )
    reasons = {
        "an encoder-decoder model": model.is_encoder_decoder,
        "a pooling model (nothing is decoded)": model.runner_type == "pooling",
        "multi-head latent attention (MLA)": model.use_mla,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "prefill context parallelism": getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "a KV cache with a scale per token and head (kv_cache_dtype="
        f"{config.cache_config.cache_dtype})": "per_token_head" in str(config.cache_config.cache_dtype),
    }
    for what, found in reasons.items():
        if found:
            raise SettingsError(f"OasisKV does not support {what}; start this model without OasisKV")
    if not current_platform.is_cpu():
        raise SettingsError(
            f"OasisKV runs on CPUs only in this version, this is {current_platform.device_name or 'another platform'}; "
            "start vLLM without OasisKV, or use the CPU build of vLLM"
        )
    if config.attention_config.backend is not None and config.attention_config.backend.name != "CPU_ATTN":
        raise SettingsError(
            f"OasisKV: attention backend {config.attention_config.backend.name} is not allowed; allowed is CPU_ATTN; "
            "drop --attention-backend"
        )
