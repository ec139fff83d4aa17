"""The CPU attention backend: attention over our tables, by our kernel where a step decodes, else by vLLM's stock ones.

Where OasisKV is off, ``get_impl_cls`` and ``get_builder_cls`` hand out vLLM's own classes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from oasiskv.core.decode_attention import MOST_TOKENS, DecodeAttention, DecodeBatch, is_for
from oasiskv.core.settings import SettingsError
from oasiskv.vllm_plugin.connector import OasisConnector
from oasiskv.vllm_plugin.spec import OasisSpec
from oasiskv.vllm_plugin.step import Batch, StepView, resolve
from oasiskv.vllm_plugin.switch import settings_of
from oasiskv.vllm_plugin.worker import Worker


def active_worker() -> Worker | None:
    """This process's worker half, once vLLM has made its connector."""
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector.worker if isinstance(connector, OasisConnector) else None


def _is_on() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and settings_of(config) is not None


class OasisCPUBackend(CPUAttentionBackend):
    """Stands in for CPU_ATTN; a pass-through unless the engine's connector is ours."""

    switched_on = False
    """Whether a layer of this process was built with OasisKV on. ``customize_spec`` is called where no config is at
    hand."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """vLLM's implementation, or ours on top of it."""
        OasisCPUBackend.switched_on = _is_on()
        return OasisCPUImpl if OasisCPUBackend.switched_on else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """vLLM's metadata builder, or ours on top of it."""
        return OasisCPUBuilder if _is_on() else CPUAttentionMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bring plain full-attention layers under our manager; leave every other kind as it is."""
        if cls.switched_on and type(spec) is FullAttentionSpec and spec.sliding_window is None:
            return OasisSpec.of(spec)
        return spec


@dataclass
class OasisCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step, and on demand our view of it.

    The view is made when the first layer asks for it: by then the connector has seen the step's own metadata.
    """

    common: CommonAttentionMetadata | None = None
    draft_pass: int | None = None
    view: StepView | None = None

    def resolve(self, worker: Worker) -> StepView:
        """Our view of the step, the same for all layers."""
        if self.view is None:
            assert self.common is not None
            self.view = resolve(worker, self.common, self.draft_pass)
        return self.view


class OasisCPUBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder; keeps what our view is made of."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """The stock metadata, with the batch it came from."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not isinstance(self.kv_cache_spec, OasisSpec):
            return stock
        values = {f.name: getattr(stock, f.name) for f in fields(stock)}
        return OasisCPUMetadata(**values, common=common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CPUAttentionMetadata:
        """The same for a pass of the draft model."""
        metadata = super().build_for_drafting(common_attn_metadata, draft_index)
        if isinstance(metadata, OasisCPUMetadata):
            metadata.draft_pass = draft_index
        return metadata


class OasisCPUImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention over dense, compact and in-place tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decoders: dict[tuple[int, int], DecodeAttention | None] = {}
        config = get_current_vllm_config_or_none()
        settings = settings_of(config) if config is not None else None
        if self.sliding_window == -1 and settings is not None:
            if self.alibi_slopes is not None:
                raise SettingsError("OasisKV: a model with ALiBi is not supported: its positions cannot be compacted")
            if self.kv_sharing_target_layer_name is not None:
                raise SettingsError("OasisKV: a model whose layers share KV across layers is not supported")
            if self.sinks is not None and settings.granularity == "head":
                raise SettingsError(
                    "OasisKV: granularity=head does not work with this model's attention sinks; allowed is layer; "
                    "set granularity=layer"
                )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See the base class."""
        worker = active_worker()
        ours = isinstance(attn_metadata, OasisCPUMetadata)
        if not ours or worker is None or not worker.pages:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert isinstance(attn_metadata, OasisCPUMetadata)
        index = worker.index[layer.layer_name]  # type: ignore[attr-defined]
        view = attn_metadata.resolve(worker)
        if view.writes is not None:
            worker.summaries[index].apply(view.writes, key)
        worker.before_attention(index, view, query, self.scale)
        if view.is_stock:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        else:
            self._sparse(worker, index, view, layer, query, kv_cache, attn_metadata, output)
        if worker.observer is not None:
            worker.observer(index, view, attn_metadata, query, key, value, output)
        worker.after_attention(index, view, query, self.scale)
        return output

    def _sparse(
        self,
        worker: Worker,
        index: int,
        view: StepView,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: OasisCPUMetadata,
        output: Tensor,
    ) -> None:
        blocks, kv_heads, size, width = kv_cache.shape
        if view.main is not None:
            batch = view.main
            q = query[: metadata.num_actual_tokens] if batch.tokens is None else query[batch.tokens]
            out = output[: metadata.num_actual_tokens] if batch.tokens is None else torch.empty_like(q)
            self._attend(layer, q, kv_cache, batch, batch.block_table, out)
            if batch.tokens is not None:
                output[batch.tokens] = out
        if view.in_place is not None:
            rows, batch = view.in_place, view.in_place.batch
            table = rows.tables(worker.map.block[index, rows.rows, :, : rows.chosen.shape[2]])
            cache = kv_cache.view(blocks * rows.heads, kv_heads // rows.heads, size, width)
            split, where = (rows.heads, self.num_heads // rows.heads), (batch.tokens, rows.head_of)
            q = query.unflatten(1, split)[where]
            out = torch.empty_like(q)
            self._attend(layer, q, cache, batch, table, out)
            output.unflatten(1, split)[where] = out

    def _attend(self, layer: Any, query: Tensor, cache: Tensor, batch: Batch, table: Tensor, output: Tensor) -> None:
        """``cache`` ``[blocks, KV heads, size, 2 D]``, of as many heads as ``table`` names pages of."""
        decode = self._decode(layer, cache, query) if batch.longest <= MOST_TOKENS else None
        if decode is None:
            self._attend_stock(layer, query, cache, batch, table, output)
            return
        if batch.decode is None:
            batch.decode = DecodeBatch(batch.query_start_loc, batch.seq_lens, table)
        elif table is not batch.block_table:  # one of this layer's own
            batch.decode.use(table)
        decode.attend(batch.decode, query, output)

    def _decode(self, layer: Any, cache: Tensor, query: Tensor) -> DecodeAttention | None:
        """Our kernel for this layer, if it computes what the layer wants from pages laid out as these are."""
        key = (cache.data_ptr(), cache.shape[1])
        if key not in self._decoders:
            plain = self.logits_soft_cap == 0 and self.sinks is None and cache.dtype is query.dtype
            fits = plain and layer.isa == "vec" and is_for(cache)
            self._decoders[key] = DecodeAttention(cache, query.shape[1], self.scale) if fits else None
        return self._decoders[key]

    def _attend_stock(
        self, layer: Any, query: Tensor, cache: Tensor, batch: Batch, table: Tensor, output: Tensor
    ) -> None:
        blocks, kv_heads, size, width = cache.shape
        if batch.scheduler is None:
            batch.scheduler = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(batch.seq_lens),
                num_heads=query.shape[1],
                num_kv_heads=kv_heads,
                head_dim=self.head_size,
                seq_lens=batch.seq_lens,
                dtype=query.dtype,
                query_start_loc=batch.query_start_loc,
                causal=True,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=self.kv_cache_dtype,
            )
        key_cache, value_cache = cache.view(blocks, kv_heads, 2 * size, width // 2).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=batch.scheduler,
            s_aux=self.sinks,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
