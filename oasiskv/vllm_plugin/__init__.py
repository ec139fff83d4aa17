"""Everything that touches vLLM: spec, block manager, connector, attention backend, metrics.

Start with ``register``, then ``connector`` (who calls whom), ``ledger`` (scheduler process) and ``worker`` (ranks).
May import ``tiers``, ``core`` and vLLM.
"""


def register() -> None:
    """Entry point ``vllm.general_plugins``: called in every vLLM process, perhaps more than once.

    Registers names and a pass-through backend; nothing changes until an engine's KV connector is ``OasisConnector``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from oasiskv.vllm_plugin.manager import OasisManager
    from oasiskv.vllm_plugin.spec import OasisSpec
    from oasiskv.vllm_plugin.validate import watch_config

    if "OasisConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("OasisConnector", "oasiskv.vllm_plugin.connector", "OasisConnector")
    KVCacheSpecRegistry._ensure_registered()  # vLLM's own first: it registers nothing once the registry is not empty
    KVCacheSpecRegistry.register(OasisSpec, OasisManager, FullAttentionSpec)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "oasiskv.vllm_plugin.backend_cpu.OasisCPUBackend")
    watch_config()
