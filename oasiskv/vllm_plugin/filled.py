"""Connectors that fill a prompt's KV with drawn numbers instead of having it computed: contexts for decode benchmarks.

vLLM's ``DecodeBenchConnector`` does so with constants or white noise, among which nothing is worth choosing. Here keys
have topics: within a block they lie around a common vector, other blocks have other ones, so that a query finds a few
blocks much better than the rest, and others as it moves. Keys and values go through the backend's own write, as
computed ones do.

``FillConnector`` is for stock vLLM, ``FilledOasisConnector`` for OasisKV.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from oasiskv.vllm_plugin.connector import OasisConnector
from oasiskv.vllm_plugin.metadata import StepMetadata
from oasiskv.vllm_plugin.switch import CONNECTOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

TOPIC_TOKENS = 32
"""Consecutive tokens with the same topic."""
BANK_TOPICS = 512
"""Stretches that are drawn once; every context is put together from them in an order of its own."""
FILL_UNIT = 128
"""Prompts are filled up to a multiple of it, so that engines with other block sizes have the same rest to compute."""
TOPIC, NOISE = 1.0, 0.7
"""Standard deviations of a topic, and of a key around it: with queries of the usual size, logits spread by about 2."""


@dataclass(frozen=True)
class Fill:
    """Device blocks to be filled; ``seed`` chooses with what."""

    seed: int
    blocks: tuple[int, ...]


class Bank:
    """Keys and values ``[stretch, TOPIC_TOKENS, KV heads, D]``, drawn once for all layers of a shape."""

    def __init__(self, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
        dice = torch.Generator().manual_seed(0)
        topic = TOPIC * torch.randn(BANK_TOPICS, 1, heads, key_dim, generator=dice)
        noise = NOISE * torch.randn(BANK_TOPICS, TOPIC_TOKENS, heads, key_dim, generator=dice)
        self.keys = (topic + noise).to(dtype)
        self.values = torch.randn(BANK_TOPICS, TOPIC_TOKENS, heads, value_dim, generator=dice).to(dtype)

    def draw(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[tokens, KV heads, D]`` of one context in one layer."""
        count = -(-tokens // TOPIC_TOKENS)
        order = torch.randint(BANK_TOPICS, (count,), generator=torch.Generator().manual_seed(seed))
        return self.keys[order].flatten(0, 1)[:tokens], self.values[order].flatten(0, 1)[:tokens]


class Fills:
    """Scheduler side: which prompts are filled, how far, and with what."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._matched: dict[str, int] = {}
        self._fills: list[Fill] = []
        self._drawn = 0

    def matched(self, request: Request, computed: int) -> int:
        """Tokens after the first ``computed`` to be filled: whole blocks, one token of the prompt left at least."""
        unit = math.lcm(self.block_size, FILL_UNIT)
        whole = (request.num_prompt_tokens - 1) // unit * unit
        self._matched[request.request_id] = computed
        return max(0, whole - computed)

    def forget(self, request: Request) -> None:
        """It is not to be filled after all."""
        self._matched.pop(request.request_id, None)

    def awaits(self, request: Request) -> bool:
        """Whether the request was last told that its prompt will be filled."""
        return request.request_id in self._matched

    def allocated(self, request: Request, blocks: list[int], tokens: int) -> None:
        """The request got its device blocks; ``tokens`` of it are to be filled."""
        first = self._matched.pop(request.request_id, 0) // self.block_size
        if tokens:
            chosen = tuple(blocks[first : first + tokens // self.block_size])
            self._fills.append(Fill(self._drawn, chosen))
            self._drawn += 1

    def take(self) -> list[Fill]:
        """The fills of this step."""
        fills, self._fills = self._fills, []
        return fills


class Filler:
    """Worker side: draws and writes."""

    def __init__(self, vllm_config: VllmConfig, block_size: int) -> None:
        self.layers: dict[str, Any] = {}
        self._context = vllm_config.compilation_config.static_forward_context
        self._block_size = block_size
        self._banks: dict[tuple[int, int, int, torch.dtype], Bank] = {}

    def register(self, names: Iterable[str]) -> None:
        """The layers whose KV is filled."""
        self.layers = {name: self._context[name] for name in names}

    def write(self, fill: Fill, index: int, name: str) -> Tensor:
        """Fill the blocks in one layer. Returns the keys ``[tokens, KV heads, D]``."""
        layer, size = self.layers[name], self._block_size
        shape = (layer.num_kv_heads, layer.head_size, getattr(layer, "head_size_v", layer.head_size), layer.dtype)
        if shape not in self._banks:
            self._banks[shape] = Bank(*shape)
        keys, values = self._banks[shape].draw(len(fill.blocks) * size, seed=1000 * fill.seed + index)
        slots = torch.tensor(fill.blocks).unsqueeze(1) * size + torch.arange(size)
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots.view(-1))
        return keys


@dataclass
class FillMetadata(KVConnectorMetadata):
    """Scheduler to worker, stock vLLM."""

    fills: list[Fill] = field(default_factory=list)


@dataclass
class FilledStepMetadata(StepMetadata):
    """Scheduler to worker, OasisKV."""

    fills: list[Fill] = field(default_factory=list)


class FillConnector(KVConnectorBase_V1):
    """Stock vLLM with filled prompts. For models with one KV cache group."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        size = _block_size(kv_cache_config)
        self.fills = Fills(size)
        self.filler = Filler(vllm_config, size)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """See the base class."""
        return self.fills.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the base class."""
        self.fills.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        scheduler_output.has_sync_kv_loads = True
        return FillMetadata(self.fills.take())

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See the base class."""
        self.filler.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See the base class."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FillMetadata)
        for fill in metadata.fills:
            for index, name in enumerate(self.filler.layers):
                self.filler.write(fill, index, name)
        metadata.fills = []

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


class FilledOasisConnector(OasisConnector):
    """OasisKV with filled prompts: to it they look as if another request had left them in the prefix cache."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        size = _block_size(kv_cache_config)
        self.fills = Fills(size)
        self.filler = Filler(vllm_config, size)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the host tier has (of a preempted request), else the whole prompt."""
        found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None or found > 0:
            self.fills.forget(request)
            return found, False
        return self.fills.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the base class."""
        assert self.scheduler is not None
        if not self.fills.awaits(request):  # it goes on from the host
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        self.fills.allocated(request, blocks.get_block_ids()[self.scheduler.layout.group], num_external_tokens)
        super().update_state_after_alloc(request, blocks, 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        return FilledStepMetadata(**vars(super().build_connector_meta(scheduler_output)), fills=self.fills.take())

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See the base class."""
        super().register_kv_caches(kv_caches)
        assert self.worker is not None
        self.filler.register(layer.name for layer in self.worker.layout.layers)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See the base class."""
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FilledStepMetadata)
        for fill in metadata.fills:
            self._fill(fill)
        metadata.fills = []

    def _fill(self, fill: Fill) -> None:
        worker = self.worker
        assert worker is not None
        blocks = torch.tensor(fill.blocks)
        for index, name in enumerate(self.filler.layers):
            keys, summaries = self.filler.write(fill, index, name), worker.summaries[index]
            summaries.store.put(blocks, summaries.scorer.summarise(keys.unflatten(0, (len(blocks), -1))))
        for book in worker.books:
            book.blocks.restore(fill.blocks)


def _block_size(kv_cache_config: KVCacheConfig) -> int:
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.block_size)


def fill_prompts() -> None:
    """From now on, engines of this process that are started with OasisKV have their prompts filled."""
    KVConnectorFactory._registry[CONNECTOR] = lambda: FilledOasisConnector
