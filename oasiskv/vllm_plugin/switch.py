"""Whether OasisKV is switched on for an engine, and with which settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.core.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR = "OasisConnector"


def settings_of(vllm_config: VllmConfig) -> Settings | None:
    """The engine's settings, or None where its KV connector is not ours.

    Raises:
        SettingsError: a setting is wrong.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    return Settings.parse(transfer.kv_connector_extra_config)
