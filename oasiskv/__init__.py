"""OasisKV: sparse decode for unmodified vLLM, with only a budget of KV blocks on the device.

Import from here: ``engine_args``, ``Settings``, ``SettingsError``, ``__version__``. Importing this package is cheap:
neither vLLM nor torch is loaded.
"""

from __future__ import annotations

from typing import Any

from oasiskv.core.settings import Settings, SettingsError

__version__ = "0.32.0"
"""The minor follows vLLM's: 0.32.x is built for and tested with vLLM 0.32."""

__all__ = ["Settings", "SettingsError", "__version__", "engine_args"]


def engine_args(**settings: Any) -> dict[str, Any]:
    """The arguments of vLLM's ``LLM`` that switch OasisKV on: ``LLM(model, **engine_args(budget_tokens=2048))``.

    Args:
        settings: fields of :class:`Settings`; those left out keep their defaults.

    Returns:
        ``{"kv_transfer_config": {...}}``, the same that ``vllm serve --kv-transfer-config`` takes as JSON. For vLLM's
        ``EngineArgs``, which takes no dictionary, wrap the value: ``KVTransferConfig(**value)``.

    Raises:
        SettingsError: a setting is unknown or wrong; raised here, before anything heavy starts.
    """
    checked = Settings.parse(settings)
    return {
        "kv_transfer_config": {
            "kv_connector": "OasisConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": checked.changed(),
        }
    }
