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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from oasiskv.core.geometry import blocks_for
from oasiskv.core.merge import merge_heads
from oasiskv.core.page_scores import Candidates, page_scores
from oasiskv.core.predictor import query_rows
from oasiskv.core.residency import ResidencyMap
from oasiskv.core.scorers import Scorer, make_scorer
from oasiskv.core.summary_store import SummaryStore
from oasiskv.core.swap_plan import EMPTY, first_set, plan_swaps
from oasiskv.eval.dense_kv import LayerKV, Prefill
from oasiskv.eval.policies import Policy

ATTENTION = "oasiskv_coverage"


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """What transformers calls in each layer, after RoPE: ``[B, heads, rows, D]`` in, ``[B, rows, heads, D]`` out."""
    out = kwargs["study"].attend(module.layer_idx, query, key, value, kwargs["scaling"])
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


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
    """``[steps, B, layers, query heads]``, open loop: dense's softmax mass on what the policy holds."""
    overlap: Tensor
    """``[steps, B, layers, KV heads]``, open loop: of the middle blocks with most of dense's mass, as many as there are
    hot slots, the share that lies in one."""
    middle: Tensor
    """``[steps]``: dense's softmax mass on the middle blocks, the candidates."""
    pages_in: Tensor
    """``[steps, B]``, closed loop: pages brought in, mean over layers and KV heads."""


class CoverageStudy:
    """The state of all policies between and within the steps of one text."""

    def __init__(self, prefill: Prefill, policies: Sequence[Policy], block_size: int, steps: int):
        """``policies`` may differ in everything but sinks and window."""
        cuts = [policy.geometry(block_size) for policy in policies]
        self.geometry = cuts[0]
        """For sinks and window."""
        if {(cut.sinks, cut.window) for cut in cuts} != {(self.geometry.sinks, self.geometry.window)}:
            raise ValueError("the policies of a study must have the same sinks and window")
        self.policies = policies
        self.batch = 1 + len(policies)
        self.layers = len(prefill.keys)
        heads, self.prompt, dim = prefill.keys[0].shape
        self.position = self.prompt  # of query row 0
        self.blocks = blocks_for(self.prompt + steps + 1, block_size)
        self._kv = [
            LayerKV(k, v, self.batch, block_size, self.blocks)
            for k, v in zip(prefill.keys, prefill.values, strict=True)
        ]
        self._loops = [*policies, *policies]
        """The closed loops, then the open ones."""
        self._caps = torch.tensor([policy.cap(block_size) for policy in self._loops])
        self._scorers = [make_scorer(p.scorer, dim, p.dtype) for p in self._loops]
        self._source = [*range(1, self.batch), *[0] * len(policies)]
        """Batch row whose queries and keys each loop sees: its own in the closed one, dense's in the open one."""
        self._summaries = [[self._first_summaries(scorer, kv) for scorer in self._scorers] for kv in self._kv]
        hots = [cut.hot for cut in cuts] * 2
        self.residency = ResidencyMap(self.layers, heads, max(hots), capacity=len(self._loops))
        self._slots = torch.tensor([self.residency.allocate(hot) for hot in hots])
        everyone = list(range(len(self._loops)))
        for layer, query in enumerate(prefill.last_query):
            queries = query.unsqueeze(0).unsqueeze(3).expand(self.batch, -1, -1, 1, -1)
            scores = self._scores(layer, queries, self.geometry.middle(self.prompt), dim**-0.5, everyone)
            blocks = first_set(scores, self.residency.hot_of[self._slots], self.geometry.sinks, max(hots))
            self.residency.seed(layer, self._slots, blocks)
        query_heads = prefill.last_query[0].shape[1] * heads
        self.mass = torch.zeros(self.batch, self.layers, query_heads)
        self.overlap = torch.zeros(self.batch, self.layers, heads)
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
        closed, opened = self._held(layer).chunk(2)
        self._measure(layer, weights[0, :, :, 0], opened)
        weights[1:] *= closed.repeat_interleave(kv.block_size, -1)[:, :, None, None]
        out = kv.mix(weights.flatten(2, 3)).unflatten(2, (-1, rows)) / weights.sum(-1, keepdim=True)
        self._plan(layer, grouped, scale)
        return out.flatten(1, 2)

    def next_step(self) -> None:
        """Row 0 is accepted; on to the next token."""
        self.position += 1
        first_window = self.geometry.first_window(self.position)
        self.residency.check_integrity(self.geometry.sinks, dict.fromkeys(self._slots.tolist(), first_window))
        self.mass.zero_()
        self.overlap.zero_()
        self.middle.zero_()
        self.pages_in.zero_()

    def _held(self, layer: int) -> Tensor:
        """bool ``[closed and open loops, Hkv, blocks]``: which blocks each of them holds."""
        resident = self.residency.block[layer, self._slots].long()
        held = torch.zeros(*resident.shape[:2], self.blocks + 1, dtype=torch.bool)
        held.scatter_(2, torch.where(resident == EMPTY, self.blocks, resident), True)
        held = held[..., :-1]
        held[..., : self.geometry.sinks] = True
        held[..., self.geometry.first_window(self.position) :] = True
        return held

    def _measure(self, layer: int, weights: Tensor, opened: Tensor) -> None:
        """Dense's weights ``[Hkv, G, T]``, not normalised, against what the open loops hold ``[policies, Hkv,
        blocks]``."""
        share = weights / weights.sum(-1, keepdim=True)
        by_block = share.unflatten(-1, (self.blocks, -1)).sum(-1)  # [Hkv, G, blocks]
        middle = slice(self.geometry.sinks, self.geometry.first_window(self.position))
        self.middle += by_block[..., middle].sum(-1).mean()
        self.mass[0, layer], self.overlap[0, layer] = 1, 1
        self.mass[1:, layer] = torch.einsum("hgb,phb->phg", by_block, opened.to(by_block.dtype)).flatten(1)
        ranked = by_block[..., middle].sum(1).argsort(dim=-1, descending=True)  # [Hkv, middle]
        hot = self.residency.hot_of[self._slots[: len(self.policies)]]
        best = torch.arange(ranked.shape[-1]) < hot.view(-1, 1, 1)
        found = opened[..., middle].gather(2, ranked.expand(len(hot), -1, -1)) & best
        self.overlap[1:, layer] = found.sum(-1) / best.sum(-1).clamp(min=1)

    def _plan(self, layer: int, grouped: Tensor, scale: float) -> None:
        """Score with this step's queries ``[B, Hkv, G, rows, D]``, and change the residency for the next."""
        committed = self.position + 1  # when the next step begins
        if committed % self.geometry.block_size == 0:
            self._summarise_block(layer, committed // self.geometry.block_size - 1)
        due = [i for i, policy in enumerate(self._loops) if (self.position + layer) % policy.interval == 0]
        if not due:
            return
        scores = self._scores(layer, grouped, self.geometry.middle(committed), scale, due)
        slots = self._slots[due]
        resident = self.residency.of(layer, slots)
        plan = plan_swaps(scores, *resident, self.geometry.sinks, self._caps[due], self.position, slots)
        self.residency.apply(layer, plan)
        closed = [i for i in due if i < len(self.policies)]
        self.pages_in[[1 + i for i in closed]] += (plan.incoming != EMPTY).sum((1, 2))[: len(closed)]

    def _scores(self, layer: int, grouped: Tensor, middle: int, scale: float, loops: Sequence[int]) -> Tensor:
        """Queries ``[B, Hkv, G, rows, D]`` -> merged scores ``[loops, Hkv, middle]``."""
        first = self.geometry.sinks
        scores = []
        for i in loops:
            settings = self._loops[i].settings
            rows = list(query_rows(grouped.shape[3], 1, settings.predictor)) if grouped.shape[3] > 1 else [0]
            queries = grouped[self._source[i]].flatten(0, 1).transpose(0, 1)  # [rows, query heads, D]
            candidates = Candidates(
                index=torch.arange(first, first + middle).view(1, -1),
                counts=torch.tensor([middle]),
                rows=torch.tensor([[rows[0], rows[-1]]]),
                row_counts=torch.tensor([[True, len(rows) > 1]]),
            )
            method, store = settings.group_merge, self._summaries[layer][i]
            hot = int(self.residency.hot_of[self._slots[i]])
            refine = settings.refined_pages(hot, self.geometry.block_size)
            merged = page_scores(self._scorers[i], queries.contiguous(), store, candidates, scale, method, refine)
            if settings.granularity == "layer":
                merged = merge_heads(merged, method).expand(-1, grouped.shape[1], -1)
            scores.append(merged)
        return torch.cat(scores)

    def _first_summaries(self, scorer: Scorer, kv: LayerKV) -> SummaryStore:
        """Filled for the blocks of the prompt."""
        summaries = scorer.summarise(kv.prompt_keys())
        store = SummaryStore.zeros(summaries.shape[1], self.blocks, summaries.shape[2], scorer.outline_bytes)
        store.put(torch.arange(len(summaries)), summaries)
        return store

    def _summarise_block(self, layer: int, block: int) -> None:
        for i, scorer in enumerate(self._scorers):
            summary = scorer.summarise(self._kv[layer].block_keys(self._source[i], block))
            self._summaries[layer][i].put(torch.tensor([block]), summary)


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
        rows["mass"].append(study.mass.clone())
        rows["overlap"].append(study.overlap.clone())
        rows["middle"].append(study.middle / study.layers)
        rows["pages_in"].append(study.pages_in / sets)
        study.next_step()
        on_step()
    return Measures(**{name: torch.stack(values) for name, values in rows.items()})
