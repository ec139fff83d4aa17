"""A thousand requests, arriving at random, a third of them hung up on, in a pool so small that some are preempted.

vLLM preempts the youngest, which are seldom bounded: now and then any other is preempted besides.

Strict (float32, pipeline inline): what each request's rows attended to is recorded; each finished answer must then come
out of the same request run alone, by an independent implementation of the model that is forced to look at exactly that.
Free (bfloat16, pipeline async): nothing is lost, stuck or left behind.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Engine, engine, prompt
from test_leaks import MIB, churn_twice
from torch import Tensor
from verifier import Verifier

TIE = 2e-3
"""Nats between the two best tokens below which either may come first."""


class Recorder(Verifier):
    """Which blocks each sparse row saw, for every layer and set of heads; and, in some layers (all of a small model),
    the masked reference besides."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.every = -(-len(worker.pages) // 4)
        self.plans: dict[str, dict[int, list[tuple[Tensor, list[list[int]]]]]] = defaultdict(dict)

    def __call__(self, layer: int, view: Any, metadata: Any, *tensors: Tensor) -> None:
        if layer % self.every == 0:
            super().__call__(layer, view, metadata, *tensors)
        for request, _, count, length in view.rows:
            sets = self._resident(layer, request, length)
            rows = self.plans[request.request_id].setdefault(layer, [])
            rows.append((torch.arange(length - count, length), sets))

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self.plans.pop(request_id, None)
        for key in [key for key in self.by_request if key[0] == request_id]:
            del self.by_request[key]


class Alone:
    """A request run alone: Hugging Face's own model of the weights, each row forced to its recorded blocks."""

    def __init__(self, folder: Path, block_size: int) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("recorded", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="recorded")
        self.model.eval()
        self.block_size = block_size
        self.visible: dict[int, Tensor] = {}

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        heads, tokens = key.shape[1:3]
        sees = self.visible.get(module.layer_idx)
        causal = torch.ones(1, tokens, tokens, dtype=torch.bool).tril() if sees is None else sees
        causal = causal.expand(heads, -1, -1).repeat_interleave(query.shape[1] // heads, dim=0)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=causal, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def logprobs(self, tokens: list[int], plans: dict[int, list[tuple[Tensor, list[list[int]]]]]) -> Tensor:
        """Log-probabilities ``[tokens, vocabulary]`` of what follows each token."""
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        block = torch.arange(len(tokens)) // self.block_size
        self.visible = {}
        for layer, rows in plans.items():
            sees = causal.expand(len(rows[0][1]), -1, -1).clone()
            for positions, sets in rows:
                positions = positions[positions < len(tokens)]
                chosen = torch.stack([torch.isin(block, torch.tensor(own)) for own in sets])
                sees[:, positions] = causal[positions] & chosen.unsqueeze(1)
            self.visible[layer] = sees
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@dataclass
class Tally:
    """What a soak saw."""

    finished: int = 0
    aborted: int = 0
    compared: int = 0
    recomputed: int = 0
    tokens: int = 0
    sparse: int = 0
    worst: float = 0.0
    running: dict[str, list[int]] = field(default_factory=dict)


def soak(e: Engine, alone: Alone, requests: int, rate: float, lengths: tuple[int, int], seed: int) -> Tally:
    """``rate`` requests arrive per step; prompts of ``lengths`` tokens, half of them over a shared document."""
    dice, tally = random.Random(seed), Tally()
    recorder = e.worker.observer = Recorder(e.worker)
    document = prompt(lengths[0], seed=seed)
    doomed: dict[str, int] = {}
    ids: dict[str, str] = {}
    arrives = sent = 0.0
    while sent < requests or tally.running:
        while sent < requests and arrives <= e.steps:
            arrives += dice.expovariate(rate)
            length = dice.randint(*lengths)
            own = prompt(length, seed=seed + int(sent))
            tokens = document[: length // 2] + own[length // 2 :] if dice.random() < 0.5 else own
            name = e.submit(tokens, dice.randint(8, 120), logprobs=2)
            ids[name] = e.request_id(name)
            tally.running[name] = tokens
            if dice.random() < 1 / 3:
                doomed[name] = e.steps + dice.randrange(80)
            sent += 1
        for name in [n for n, when in doomed.items() if when <= e.steps]:
            del doomed[name]
            if tally.running.pop(name, None) is not None:
                e.abort(name)
                recorder.forget(ids.pop(name))
                tally.aborted += 1
        if not tally.running:
            e.steps = max(e.steps, int(arrives) + 1)
            continue
        if e.scheduler.running and dice.random() < 0.04:
            e.preempt(dice.choice(e.scheduler.running))
        for output in e.step():
            tokens, own_id = tally.running.pop(output.request_id), ids.pop(output.request_id)
            doomed.pop(output.request_id, None)
            tally.finished += 1
            _compare(tally, alone, tokens, output.outputs[0], recorder.plans.get(own_id, {}), own_id, e)
            recorder.forget(own_id)
    assert max(recorder.report.worst.values()) < 1e-5, str(recorder.report)
    return tally


def _compare(tally: Tally, alone: Alone, tokens: list[int], answer: Any, plans: Any, own_id: str, e: Engine) -> None:
    started_over = {request for request, state in e.preempted if state != "BOUNDED"}
    if own_id in started_over:  # its KV was made anew, densely: the rows were held to the masked reference
        tally.recomputed += 1
        return
    output = list(answer.token_ids)
    expected = alone.logprobs(tokens + output[:-1], plans)[len(tokens) - 1 :]
    best = expected.topk(2).values
    for i, (token, given) in enumerate(zip(output, answer.logprobs, strict=True)):
        error = abs(given[token].logprob - expected[i, token].item())
        tally.worst = max(tally.worst, error)
        assert error < 1e-3, f"{own_id}: token {i} of {len(output)}: log-probability differs by {error:.2e}"
        clear = best[i, 0] - best[i, 1] > TIE
        assert token == int(expected[i].argmax()) or not clear, f"{own_id}: token {i} is not the best"
    tally.compared += 1
    if tally.compared % 50 == 0:
        print(f"{tally.compared} compared, step {e.steps}", flush=True)
    tally.tokens += len(output)
    tally.sparse += len({int(p) for rows in plans.values() for positions, _ in rows for p in positions})


def strict(folder: Path, requests: int, pool: int, budget: int, lengths: tuple[int, int], rate: float) -> Tally:
    vllm = {"num_gpu_blocks_override": pool, "max_model_len": 760, "max_num_seqs": 16}
    with engine(folder, vllm=vllm, budget_tokens=budget, reuse_approximate=False, host_gib="auto") as e:
        tally = soak(e, Alone(folder, e.worker.geometry.block_size), requests, rate, lengths, seed=7)
        preempted, resumed = len(e.preempted), e.counts["resumed_requests"]
        print(
            f"{tally.finished} finished, {tally.aborted} aborted, {preempted} preempted ({resumed} resumed from the "
            f"host), {tally.compared} compared with {tally.tokens} tokens ({tally.sparse} of sparse rows), "
            f"{tally.recomputed} recomputed, worst log-probability error {tally.worst:.1e}"
        )
        assert tally.finished + tally.aborted == requests and tally.aborted > requests // 5
        assert tally.compared > tally.finished // 2 and tally.sparse > tally.tokens // 4
        assert preempted > requests // 100 and resumed > 0
        return tally


def test_a_hundred_requests_as_each_alone(tiny_llama: Path) -> None:
    strict(tiny_llama, 100, pool=40, budget=192, lengths=(40, 600), rate=0.4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_requests_as_each_alone(tiny_llama: Path) -> None:
    strict(tiny_llama, 1000, pool=40, budget=192, lengths=(40, 600), rate=0.4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_requests_as_each_alone_with_real_weights() -> None:
    from oasiskv.models import resolve_model

    strict(Path(resolve_model("smollm2")), 1000, pool=40, budget=192, lengths=(40, 400), rate=0.4)


def free(folder: Path, residency: str) -> None:
    vllm = {"num_gpu_blocks_override": 48, "max_model_len": 900, "dtype": "bfloat16"}
    with engine(folder, vllm=vllm, residency=residency, budget_tokens=192, pipeline="async") as e:
        aborted, objects, size = churn_twice(e, 500, seed=10_000)
        assert aborted > 100 and e.preempted and e.counts["pages_fetched"] > 1000
        assert objects < 200 and size < 16 * MIB


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("residency", ["bounded", "auto"])
def test_a_thousand_requests_at_full_speed_leave_nothing(tiny_llama: Path, residency: str) -> None:
    free(tiny_llama, residency)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_requests_at_full_speed_leave_nothing_with_real_weights() -> None:
    from oasiskv.models import resolve_model

    free(Path(resolve_model("smollm2")), "auto")
