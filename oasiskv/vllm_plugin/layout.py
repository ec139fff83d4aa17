"""Which layers are ours, what each keeps of a block, and how large the host pool is. Same answer in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from oasiskv.core.container import usable_memory
from oasiskv.core.geometry import Geometry, blocks_for
from oasiskv.core.scorers import Scorer, make_scorer
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.tiers.host import LayerShape, bytes_per_block
from oasiskv.vllm_plugin.spec import OasisSpec

GIB = 1 << 30
HOST_POOLS = 4
"""`host_gib = auto`: this many times the device KV pool, at most a quarter of the machine's (or container's) memory."""


@dataclass(frozen=True)
class OasisLayer:
    """One attention layer under our manager, of the target model or of its drafter."""

    name: str
    is_draft: bool
    head_dim: int
    shape: LayerShape


@dataclass(frozen=True)
class Layout:
    """Our layers in their order, the group they form, and the size of the pools."""

    group: int
    geometry: Geometry
    layers: tuple[OasisLayer, ...]
    device_blocks: int
    host_blocks: int
    whole: bool = True
    """Whether our group is the model's only one, so that a prefix can be restored from what we keep."""
    summaries_in_pool: bool = True
    """Whether the summaries of device blocks lie in the device pool. Where device and host memory are the same they lie
    beside the host pool and count as part of it, so that the device pool is all KV, as stock vLLM's is."""

    @property
    def shapes(self) -> list[LayerShape]:
        """What each layer keeps of a block, in order."""
        return [layer.shape for layer in self.layers]

    @property
    def device_summary_bytes(self) -> int:
        """Bytes of the summaries of all device blocks."""
        return self.device_blocks * sum(shape.summary_bytes for shape in self.shapes)

    @property
    def reserved_blocks(self) -> int:
        """Device blocks at the end of the pool whose memory holds the summaries of all the others."""
        if not self.summaries_in_pool:
            return 0
        need = [-(-self.device_blocks * layer.shape.summary_bytes // layer.shape.block_bytes) for layer in self.layers]
        return max(need, default=0)


def summary_dtype(settings: Settings, model_dtype: torch.dtype) -> torch.dtype:
    """The number format of the summaries, with ``auto`` resolved."""
    if settings.summary_dtype == "auto":
        return torch.float32 if model_dtype == torch.float32 else torch.bfloat16
    return getattr(torch, settings.summary_dtype)


def layer_scorer(settings: Settings, head_dim: int, model_dtype: torch.dtype) -> Scorer:
    """The scorer of one layer."""
    return make_scorer(settings.scorer, head_dim, summary_dtype(settings, model_dtype))


def is_draft_layer(name: str, vllm_config: VllmConfig) -> bool:
    """Whether a layer belongs to the drafter: its own prefix, or an index past the target's last layer."""
    if vllm_config.speculative_config is None:
        return False
    if name.startswith("draft_model."):
        return True
    return extract_layer_index(name) >= vllm_config.model_config.get_total_num_hidden_layers()


def layout_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> Layout:
    """Find our group and measure it.

    Raises:
        SettingsError: full-attention layers are not all in one group of ours, or the host pool is too small.
    """
    ours = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        uniform = isinstance(spec, UniformTypeKVCacheSpecs)
        specs = spec.kv_cache_specs if uniform else dict.fromkeys(group.layer_names, spec)
        kinds = {isinstance(specs[name], OasisSpec) for name in group.layer_names}
        if kinds == {True}:
            ours.append((index, [(name, specs[name]) for name in group.layer_names]))
        elif len(kinds) > 1:
            raise SettingsError("OasisKV: a KV cache group mixes our layers with others; this model is not supported")
    if len(ours) != 1:
        raise SettingsError(
            f"OasisKV: the model's full-attention layers form {len(ours)} KV cache groups; allowed is exactly 1; "
            "this model is not supported: start it without OasisKV"
        )
    index, named = ours[0]
    block_size = named[0][1].block_size
    geometry = Geometry.of(settings, block_size)
    layers = []
    for name, spec in named:
        draft = is_draft_layer(name, vllm_config)
        scorer = layer_scorer(settings, spec.head_size, vllm_config.model_config.dtype)
        shape = LayerShape(
            heads=spec.num_kv_heads,
            page_elements=spec.block_size * (spec.head_size + spec.head_size_v),
            dtype=spec.dtype,
            page_summary_bytes=scorer.page_bytes(geometry.parts),
            outline_bytes=scorer.outline_bytes,
        )
        layers.append(OasisLayer(name, draft, spec.head_size, shape))
    shapes = [layer.shape for layer in layers]
    device_blocks, one_memory = kv_cache_config.num_blocks, vllm_config.device_config.device_type == "cpu"
    beside = device_blocks * sum(shape.summary_bytes for shape in shapes) if one_memory else 0
    host = _host_blocks(vllm_config, settings, shapes, device_blocks, block_size, beside)
    whole = len(kv_cache_config.kv_cache_groups) == 1
    in_pool = not (one_memory and host)
    return Layout(index, geometry, tuple(layers), device_blocks, host, whole, summaries_in_pool=in_pool)


def _host_blocks(
    vllm_config: VllmConfig,
    settings: Settings,
    shapes: Sequence[LayerShape],
    device_blocks: int,
    block_size: int,
    beside: int,
) -> int:
    """Host blocks of one rank. ``beside``: bytes of the host pool that are not theirs."""
    if settings.residency in ("dense", "in_place"):
        return 0
    each = bytes_per_block(shapes)
    one_request = blocks_for(vllm_config.model_config.max_model_len, block_size)
    ranks = vllm_config.parallel_config.world_size
    if settings.host_gib == "auto":
        pool = device_blocks * sum(s.block_bytes for s in shapes)
        share = min(HOST_POOLS * pool, usable_memory() // (4 * ranks))
        return max((share - beside) // each, one_request)
    blocks = max(0, int(settings.host_gib * GIB / ranks) - beside) // each
    if blocks < one_request and (settings.host_gib > 0 or settings.residency == "bounded"):
        least = (one_request * each + beside) * ranks / GIB
        summaries = " beside the summaries of the device pool" if beside else ""
        raise SettingsError(
            f"OasisKV: host_gib={settings.host_gib} holds {blocks} blocks{summaries}, one request of max_model_len="
            f"{vllm_config.model_config.max_model_len} needs {one_request}; allowed is {least:.3f} or more"
            f"{'' if settings.residency == 'bounded' else ', or 0 for no host pool'}; "
            "raise host_gib or lower --max-model-len"
        )
    return blocks
