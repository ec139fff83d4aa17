"""What is refused, with one clear message: a configuration when vLLM builds it, a request when it is submitted.

vLLM has no hook for a connector at either place, so two of its functions are wrapped: ``VllmConfig.__post_init__``,
and, once an engine with OasisKV is configured, ``current_platform.validate_request``.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

from oasiskv.core.geometry import Geometry
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.vllm_plugin.switch import BUDGET, settings_of
from oasiskv.vllm_plugin.workarounds import let_engines_follow_numba

GIB = 1 << 30
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
            let_engines_follow_numba()
            _watch_requests(settings, self.cache_config.block_size)

    checked._oasiskv = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = checked  # type: ignore[method-assign]


def _watch_requests(settings: Settings, block_size: int) -> None:
    platform = type(current_platform)
    original = getattr(platform.validate_request, "_oasiskv_original", platform.validate_request.__func__)

    def validate_request(cls: Any, processed_inputs: Any, params: Any) -> None:
        check_request(params, settings, block_size)
        original(cls, processed_inputs, params)

    validate_request._oasiskv_original = original  # type: ignore[attr-defined]
    platform.validate_request = classmethod(validate_request)


def check_request(params: Any, settings: Settings, block_size: int) -> None:
    """Refuse a request whose own budget cannot be used.

    Raises:
        VLLMValidationError: the value, what is allowed, and the fix (HTTP 400 from the server).
    """
    value = (getattr(params, "extra_args", None) or {}).get(BUDGET)
    if value is None:
        return
    allowed = f"allowed is a whole number of tokens up to the server's budget_tokens={settings.budget_tokens}"
    if not isinstance(value, int) or isinstance(value, bool) or value > settings.budget_tokens:
        raise VLLMValidationError(f"OasisKV: {BUDGET}={value!r} is not allowed: {allowed}", parameter=BUDGET)
    try:
        Geometry.of(settings, block_size, value)
    except SettingsError as error:
        raise VLLMValidationError(str(error).replace("budget_tokens", BUDGET), parameter=BUDGET) from None


def check(config: VllmConfig) -> None:
    """Refuse what OasisKV cannot serve.

    Raises:
        SettingsError: the value, what is allowed, and the fix.
    """
    settings = settings_of(config)
    model = config.model_config
    if settings is None or model is None:
        return
    reasons = {
        "an encoder-decoder model": model.is_encoder_decoder,
        "a pooling model (nothing is decoded)": model.runner_type == "pooling",
        "multi-head latent attention (MLA)": model.use_mla,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "prefill context parallelism": getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1,
        "sliding-window layers without the hybrid KV cache manager (--disable-hybrid-kv-cache-manager)": bool(
            config.scheduler_config.disable_hybrid_kv_cache_manager and model.get_sliding_window()
        ),
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "a KV cache with a scale per token and head (kv_cache_dtype="
        f"{config.cache_config.cache_dtype})": "per_token_head" in str(config.cache_config.cache_dtype),
    }
    for what, found in reasons.items():
        if found:
            raise SettingsError(f"OasisKV does not support {what}; start this model without OasisKV")
    Geometry.of(settings, config.cache_config.block_size)
    _check_host_pool(config, settings)
    if current_platform.is_cpu() and config.cache_config.block_size % 32:
        raise SettingsError(
            f"OasisKV: block_size={config.cache_config.block_size} is not allowed: the CPU attention backend takes "
            "multiples of 32; use --block-size 32"
        )
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


def _check_host_pool(config: VllmConfig, settings: Settings) -> None:
    """The host pool must hold one request of the longest allowed (summaries come on top; the engine counts exactly)."""
    if settings.host_gib == "auto" or settings.residency in ("dense", "in_place"):
        return
    model, parallel = config.model_config, config.parallel_config
    token = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.get_num_layers(parallel)
    need = token * model.dtype.itemsize * model.max_model_len * parallel.world_size / GIB
    if settings.host_gib < need and (settings.host_gib > 0 or settings.residency == "bounded"):
        raise SettingsError(
            f"OasisKV: host_gib={settings.host_gib} is too small for one request of max_model_len="
            f"{model.max_model_len}; allowed is about {need * 1.1:.3f} or more; raise host_gib or lower --max-model-len"
        )
