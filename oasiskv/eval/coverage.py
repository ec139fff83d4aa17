"""The coverage study: policies side by side through one model, each with the blocks its own scorer chose.

A prompt is prefilled densely. Then the text goes on teacher-forced, one batch row per policy; row 0 of the batch is
dense. In each step a batch row has two query rows, the newest token and a draft of the next one (here always right),
as in a verify step of speculative decoding::

    step n, one layer:   new KV -> attention over [sinks | resident blocks | window | tail]
                                -> scores of the middle blocks, from the query rows of the predictor
                                -> swap plan -> residency of step n + 1

Each policy appears twice. *Closed loop*: its own queries choose, its own batch row lives with the choice; that gives
likelihoods. *Open loop*: dense's queries choose, and dense's softmax mass on the choice is measured; a closed loop
would flatter a bad policy, whose heads stop looking for what they no longer find.

Attention is computed over all tokens and then masked. Nothing here is shared with the engine but the classes of
``core``, which makes it a check on the policy, not on the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from oasiskv.core.geometry import Geometry, blocks_for
from oasiskv.core.link_budget import pages_per_step
from oasiskv.core.merge import merge_heads, merge_scores, read_on
from oasiskv.core.predictor import query_rows
from oasiskv.core.residency import ResidencyMap
from oasiskv.core.scorers import make_scorer
from oasiskv.core.settings import PART_TOKENS, Settings
from oasiskv.core.swap_plan import EMPTY, first_set, plan_swaps

ATTENTION = "oasiskv_coverage"


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """What transformers calls in each layer, after RoPE: ``[B, heads, rows, D]`` in, ``[B, rows, heads, D]`` out."""
    out = kwargs["study"].attend(module.layer_idx, query, key, value, kwargs["scaling"])
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True)
class Policy:
    """A row of the study: a scorer, and the number format of its summaries."""

    scorer: str
    dtype: torch.dtype = torch.bfloat16


@dataclass
class Measures:
    """What was seen, one row per step and one column per batch row (dense first)."""

    nll: Tensor
    """``[steps, B]``: nats of the true next token."""
    kl: Tensor
    """``[steps, B]``: divergence of the policy's next-token distribution from dense's."""
    same_top: Tensor
    """bool ``[steps, B]``: has the policy's most likely token that of dense?"""
    mass: Tensor
    """``[steps, B]``, open loop: dense's softmax mass on what the policy holds; mean over layers and query heads."""
    middle: Tensor
    """``[steps]``: dense's softmax mass on the middle blocks, the candidates."""
    pages_in: Tensor
    """``[steps, B]``, closed loop: pages brought in, mean over layers and KV heads."""


@dataclass
class Prefill:
    """Dense causal attention over the prompt, keeping what the study starts from."""

    keys: list[Tensor] = field(default_factory=list)
    """Per layer ``[Hkv, N, D]``, after RoPE."""
    values: list[Tensor] = field(default_factory=list)
    last_query: list[Tensor] = field(default_factory=list)
    """Per layer ``[Hkv, G, D]``: of the last prompt row."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.keys.append(key[0].clone())
        self.values.append(value[0].clone())
        self.last_query.append(query[0, :, -1].reshape(key.shape[1], -1, key.shape[-1]).clone())
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )


class LayerKV:
    """One layer's keys and values: whole blocks of the prompt shared by all batch rows, the rest for each its own."""

    def __init__(self, keys: Tensor, values: Tensor, batch: int, block_size: int, blocks: int) -> None:
        self.block_size = block_size
        self.shared = keys.shape[1] // block_size * block_size
        self._shared = keys[:, : self.shared].contiguous(), values[:, : self.shared].contiguous()
        heads, tokens, dim = keys.shape
        self._own = tuple(keys.new_zeros(batch, heads, blocks * block_size - self.shared, dim) for _ in range(2))
        for own, whole in zip(self._own, (keys, values), strict=True):
            own[:, :, : tokens - self.shared] = whole[:, self.shared :]

    def write(self, position: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values ``[B, Hkv, rows, D]`` of tokens ``position`` onwards."""
        rows = slice(position - self.shared, position - self.shared + keys.shape[2])
        self._own[0][:, :, rows], self._own[1][:, :, rows] = keys, values

    def logits(self, queries: Tensor) -> Tensor:
        """Queries ``[B, Hkv, n, D]`` -> ``[B, Hkv, n, T]``, not scaled."""
        flat = queries.transpose(0, 1).flatten(1, 2)  # one product over all batch rows
        shared = (flat @ self._shared[0].transpose(1, 2)).unflatten(1, (queries.shape[0], -1)).transpose(0, 1)
        return torch.cat((shared, queries @ self._own[0].transpose(2, 3)), dim=-1)

    def mix(self, weights: Tensor) -> Tensor:
        """Weights ``[B, Hkv, n, T]`` -> weighted sum of the values ``[B, Hkv, n, D]``."""
        flat = weights[..., : self.shared].transpose(0, 1).flatten(1, 2)
        shared = (flat @ self._shared[1]).unflatten(1, (weights.shape[0], -1)).transpose(0, 1)
        return shared + weights[..., self.shared :] @ self._own[1]

    def prompt_parts(self) -> Tensor:
        """Keys of the shared blocks as parts ``[n, PART_TOKENS, Hkv, D]``."""
        return self._shared[0].transpose(0, 1).unflatten(0, (-1, PART_TOKENS))

    def block_parts(self, batch_row: int, block: int) -> Tensor:
        """The same of one later block, as this batch row has it."""
        start = block * self.block_size - self.shared
        keys = self._own[0][batch_row, :, start : start + self.block_size]
        return keys.transpose(0, 1).unflatten(0, (-1, PART_TOKENS))


class CoverageStudy:
    """The state of all policies between and within the steps of one text."""

    def __init__(self, prefill: Prefill, policies: Sequence[Policy], settings: Settings, block_size: int, steps: int):
        self.geometry = Geometry.of(settings, block_size)
        self.settings = settings
        self.policies = policies
        self.batch = 1 + len(policies)
        self.layers = len(prefill.keys)
        heads, self.prompt, dim = prefill.keys[0].shape
        self.position = self.prompt  # of query row 0
        self.blocks = blocks_for(self.prompt + steps + 1, block_size)
        self.cap = pages_per_step(_share(settings), self.geometry)
        self._kv = [
            LayerKV(k, v, self.batch, block_size, self.blocks)
            for k, v in zip(prefill.keys, prefill.values, strict=True)
        ]
        self._scorers = [make_scorer(p.scorer, dim, p.dtype) for p in policies] * 2
        self._source = [*range(1, self.batch), *[0] * len(policies)]
        """Batch row whose queries and keys each scorer sees: its own in the closed loop, dense's in the open one."""
        self._summaries = [[self._first_summaries(scorer, kv) for scorer in self._scorers] for kv in self._kv]
        sets = 1 if settings.granularity == "layer" else heads
        self.residency = ResidencyMap(self.layers, sets, self.geometry.hot, capacity=len(self._scorers))
        self._slots = torch.tensor([self.residency.allocate() for _ in self._scorers])
        for layer, query in enumerate(prefill.last_query):
            queries = query.unsqueeze(1).expand(len(self._scorers), heads, 1, *query.shape[1:])
            scores = self._scores(layer, queries, self.geometry.middle(self.prompt), dim**-0.5)
            blocks = first_set(scores, self.residency.hot_of[self._slots], self.geometry.sinks, self.geometry.hot)
            self.residency.seed(layer, self._slots, blocks)
        self.mass = torch.zeros(self.batch)
        self.middle = torch.zeros(())
        """Of this step, summed over layers, as in :class:`Measures`."""
        self.pages_in = torch.zeros(self.batch)
        """Of this step, summed over layers and KV heads."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Masked attention of the step's two query rows; measures dense's row 0; plans this layer's next residency."""
        kv = self._kv[layer]
        kv.write(self.position, key, value)
        rows = query.shape[2]
        grouped = query.unflatten(1, (key.shape[1], -1))  # [B, Hkv, G, rows, D]
        logits = kv.logits(grouped.flatten(2, 3)).unflatten(2, (-1, rows)) * scale  # [B, Hkv, G, rows, T]
        tokens = torch.arange(logits.shape[-1])
        seen = tokens <= self.position + torch.arange(rows).unsqueeze(1)
        weights = logits.masked_fill_(~seen, float("-inf"))
        weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        closed, opened = self._held(layer).repeat_interleave(kv.block_size, -1).chunk(2)
        self._measure(weights[0, :, :, 0], opened)
        weights[1:] *= closed[:, :, None, None]
        out = kv.mix(weights.flatten(2, 3)).unflatten(2, (-1, rows)) / weights.sum(-1, keepdim=True)
        self._plan(layer, grouped, scale)
        return out.flatten(1, 2)

    def next_step(self) -> None:
        """Row 0 is accepted; on to the next token."""
        self.position += 1
        first_window = self.geometry.first_window(self.position)
        self.residency.check_integrity(self.geometry.sinks, dict.fromkeys(self._slots.tolist(), first_window))
        self.mass.zero_()
        self.middle.zero_()
        self.pages_in.zero_()

    def _held(self, layer: int) -> Tensor:
        """bool ``[closed and open loops, Hkv or 1, blocks]``: which blocks each of them holds."""
        resident = self.residency.block[layer, self._slots].long()
        held = torch.zeros(*resident.shape[:2], self.blocks + 1, dtype=torch.bool)
        held.scatter_(2, torch.where(resident == EMPTY, self.blocks, resident), True)
        held = held[..., :-1]
        held[..., : self.geometry.sinks] = True
        held[..., self.geometry.first_window(self.position) :] = True
        return held

    def _measure(self, weights: Tensor, opened: Tensor) -> None:
        """Dense's weights ``[Hkv, G, T]``, not normalised, against the open loops' tokens ``[policies, Hkv or 1,
        T]``."""
        size = self.geometry.block_size
        share = weights / weights.sum(-1, keepdim=True)
        middle = share[..., self.geometry.sinks * size : self.geometry.first_window(self.position) * size]
        self.middle += middle.sum(-1).mean()
        self.mass[0] += 1
        self.mass[1:] += (share.sum(1) * opened).sum((1, 2)) / share.shape[:2].numel()

    def _plan(self, layer: int, grouped: Tensor, scale: float) -> None:
        """Score with this step's queries ``[B, Hkv, G, rows, D]``, and change the residency for the next."""
        committed = self.position + 1  # when the next step begins
        if committed % self.geometry.block_size == 0:
            self._summarise_block(layer, committed // self.geometry.block_size - 1)
        rows = list(query_rows(grouped.shape[3], 1, self.settings.predictor))
        queries = grouped[self._source][:, :, :, rows].transpose(2, 3)
        scores = self._scores(layer, queries, self.geometry.middle(committed), scale)
        resident = self.residency.of(layer, self._slots)
        plan = plan_swaps(scores, *resident, self.geometry.sinks, self.cap, self.position, self._slots)
        self.residency.apply(layer, plan)
        self.pages_in[1:] += (plan.incoming != EMPTY).sum((1, 2))[: len(self.policies)]

    def _scores(self, layer: int, queries: Tensor, middle: int, scale: float) -> Tensor:
        """Queries ``[loops, Hkv, rows, G, D]`` -> merged scores ``[loops, Hkv or 1, middle]``."""
        candidates = slice(self.geometry.sinks, self.geometry.sinks + middle)
        scores = [
            scorer.score(query.flatten(1, 2), summaries[:, candidates], scale)
            for scorer, query, summaries in zip(self._scorers, queries, self._summaries[layer], strict=True)
        ]
        stacked = torch.stack(scores).unflatten(2, queries.shape[2:4])
        method = self.settings.group_merge
        merged = merge_scores(stacked, torch.ones(len(scores), middle, dtype=torch.bool), method)
        if method.startswith("softmax"):
            merged = read_on(merged)
        return merge_heads(merged, method) if self.settings.granularity == "layer" else merged

    def _first_summaries(self, scorer: Any, kv: LayerKV) -> Tensor:
        """uint8 ``[Hkv, blocks, parts, bytes]``, filled for the blocks of the prompt."""
        parts = scorer.summarise(kv.prompt_parts()).transpose(0, 1)
        summaries = parts.new_zeros(parts.shape[0], self.blocks, self.geometry.parts, scorer.part_bytes)
        prompt_blocks = parts.shape[1] // self.geometry.parts
        summaries[:, :prompt_blocks] = parts.unflatten(1, (prompt_blocks, -1))
        return summaries

    def _summarise_block(self, layer: int, block: int) -> None:
        for i, scorer in enumerate(self._scorers):
            parts = scorer.summarise(self._kv[layer].block_parts(self._source[i], block))
            self._summaries[layer][i][:, block] = parts.transpose(0, 1)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def prefill(model: Any, prompt: Sequence[int]) -> Prefill:
    """Run ``prompt`` densely through ``model`` (a Hugging Face causal LM whose attention can be exchanged)."""
    model.set_attn_implementation(ATTENTION)
    start = Prefill()
    model(input_ids=torch.tensor([list(prompt)]), use_cache=False, logits_to_keep=1, study=start)
    return start


@torch.inference_mode()  # type: ignore[untyped-decorator]
def run(
    model: Any, study: CoverageStudy, continuation: Sequence[int], on_step: Callable[[], None] = lambda: None
) -> Measures:
    """Follow ``continuation`` (after the prompt of ``study``) with right drafts; its last token is a target only."""
    steps, batch = len(continuation) - 1, study.batch
    rows: dict[str, list[Tensor]] = {name: [] for name in Measures.__dataclass_fields__}
    sets = study.layers * study.residency.heads
    for step in range(steps):
        tokens = torch.tensor([continuation[step : step + 2]] * batch)
        positions = torch.tensor([[study.position, study.position + 1]] * batch)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, study=study).logits[:, 0]
        log_probs = logits.float().log_softmax(-1)
        rows["nll"].append(-log_probs[:, continuation[step + 1]])
        rows["kl"].append((log_probs[0].exp() * (log_probs[0] - log_probs)).sum(-1))
        rows["same_top"].append(log_probs.argmax(-1) == log_probs[0].argmax())
        rows["mass"].append(study.mass / study.layers)
        rows["middle"].append(study.middle / study.layers)
        rows["pages_in"].append(study.pages_in / sets)
        study.next_step()
        on_step()
    return Measures(**{name: torch.stack(values) for name, values in rows.items()})


def _share(settings: Settings) -> float:
    if settings.fetch_cap == "auto":
        raise ValueError("fetch_cap='auto' needs a measured link, which the study does not have; give a share")
    return settings.fetch_cap
