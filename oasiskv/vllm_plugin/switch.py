"""Whether OasisKV is switched on for an engine, and with which settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.core.settings import Settings, SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR = "OasisConnector"
BUDGET = "oasis_budget_tokens"
"""Key of ``SamplingParams.extra_args`` with a request's own budget."""


def settings_of(vllm_config: VllmConfig) -> Settings | None:
    """The engine's settings, or None where its KV connector is not ours.

    Raises:
        SettingsError: a setting is wrong.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    if transfer.kv_connector != CONNECTOR:
        beside = transfer.kv_connector_extra_config.get("connectors", ())
        if any(isinstance(child, dict) and child.get("kv_connector") == CONNECTOR for child in beside):
            raise SettingsError(
                f"OasisKV: {CONNECTOR} inside {transfer.kv_connector} is not supported: it cannot share a request's "
                f"blocks with another connector; make {CONNECTOR} the only kv_connector"
            )
        return None
    return Settings.parse(transfer.kv_connector_extra_config)
