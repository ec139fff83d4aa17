"""The KV connector: the thread that joins scheduler and workers. Two halves behind one class, as vLLM wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from oasiskv.vllm_plugin.layout import layout_of
from oasiskv.vllm_plugin.metadata import StepMetadata, WorkerAck
from oasiskv.vllm_plugin.metrics import OasisPromMetrics, OasisStats
from oasiskv.vllm_plugin.scheduler import SchedulerHalf
from oasiskv.vllm_plugin.switch import settings_of
from oasiskv.vllm_plugin.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class OasisConnector(KVConnectorBase_V1, SupportsHMA):
    """Routes vLLM's calls to the half that lives in this process."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config)
        assert settings is not None
        layout = layout_of(vllm_config, kv_cache_config, settings)
        self.scheduler: SchedulerHalf | None = None
        self.worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(vllm_config, settings, layout)
        else:
            self.worker = Worker(vllm_config, settings, layout)

    @property
    def requires_kv_delivery(self) -> bool:
        """A copy that is dropped is only a copy to make again."""
        return False

    # -- scheduler process

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM has built its cache manager: find our block manager in it."""
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self.scheduler is not None
        self.scheduler.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A waiting request is about to be tried."""
        assert self.scheduler is not None
        return self.scheduler.may_start(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A waiting request got its slots."""
        assert self.scheduler is not None
        self.scheduler.started(request, blocks.get_block_ids()[self.scheduler.layout.group], num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished; its blocks may be freed at once (the block manager tells the ledger)."""
        return False, None

    def has_pending_block_frees(self) -> bool:
        """A running request cannot grow; whether to wait for our frees before anyone is preempted."""
        assert self.scheduler is not None
        return self.scheduler.frees_are_near()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step is scheduled: tell the workers."""
        assert self.scheduler is not None
        scheduler_output.has_sync_kv_loads = True
        return self.scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' answers to a step."""
        assert self.scheduler is not None
        ack = connector_output.kv_connector_worker_meta
        if isinstance(ack, WorkerAck):
            self.scheduler.ledger.acknowledge(ack.copied_step)

    def reset_cache(self) -> bool:
        """The host tier forgets everything that requests do not hold."""
        assert self.scheduler is not None
        self.scheduler.forget()
        return True

    # -- worker process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device KV is allocated."""
        assert self.worker is not None
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Before the forward pass (and once more after it on an empty trailing step): take in the step's metadata."""
        assert self.worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.worker.begin_step(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: the attention layer commits its own swaps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do per layer: blocks are copied out when the step is done."""

    def wait_for_save(self) -> None:
        """After the forward pass: copy out the blocks that are full and committed."""
        assert self.worker is not None
        self.worker.end_step()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank answers to the step."""
        assert self.worker is not None
        return WorkerAck(self.worker.copied_step)

    def shutdown(self) -> None:
        """Stop the background pipeline."""
        if self.worker is not None:
            self.worker.shutdown()

    # -- statistics

    def get_kv_connector_stats(self) -> OasisStats | None:
        """Counts since the last call."""
        half = self.scheduler or self.worker
        return half.take_stats() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OasisStats:
        """Rebuild the statistics on the other side of a pipe."""
        return OasisStats(data=data) if data is not None else OasisStats()

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> OasisPromMetrics:
        """The Prometheus view of the statistics."""
        return OasisPromMetrics(*args, **kwargs)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Attention runs Python between the graphs of a step."""
        return True
