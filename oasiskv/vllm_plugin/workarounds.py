"""Faults of vLLM 0.32 that we met, mended in this process only and only where OasisKV is switched on."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher


def let_engines_follow_numba() -> None:
    """A second CPU engine in one process does not start once numba has compiled something; let it start.

    vLLM looks for copies of its kernels in every loaded module and stumbles over an object of llvmlite (of numba)
    that answers to every name: "'_lib_fn_wrapper' object has no attribute 'get'". No kernel of vLLM is in there, so
    llvmlite is kept out of the search.
    """
    original = dispatcher._rebind_kernels
    if getattr(original, "_oasiskv", False):
        return

    @functools.wraps(original)
    def rebind(*args: Any, **kwargs: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
        try:
            original(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    rebind._oasiskv = True  # type: ignore[attr-defined]
    dispatcher._rebind_kernels = rebind


def sample_beside_drafts() -> None:
    """With speculation on a CPU, give every draft token its request's own temperature, top-k and top-p.

    vLLM spreads them with a kernel that takes whole numbers of 64 bits only: it fills a copy, and what the sampler
    then divides the logits by is whatever lay in memory. Requests that sample, and greedy ones beside them, get wrong
    tokens. And a step in which no draft is left to check ends the engine where a request has a top-k.
    """
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.apply_sampling_constraints
    if getattr(original, "_oasiskv", False) or not current_platform.is_cpu():
        return

    @functools.wraps(original)
    def apply(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(logits, *args, **kwargs) if len(logits) else logits

    def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        spread = x.repeat_interleave(counts, output_size=num_tokens)
        return torch.where(spread == replace_from, replace_to, spread)

    apply._oasiskv = True  # type: ignore[attr-defined]
    rejection_sampler.apply_sampling_constraints = apply
    rejection_sampler.expand_batch_to_tokens = expand


def rewind_seeded_requests() -> None:
    """Let a request with a seed be prefilled in chunks on a CPU.

    What is sampled after all but the last chunk is thrown away, and the request's generator wound back, in a way that
    generators on CPUs do not have: "CPU Generator does not use offset" ends the engine. Here its state is kept instead.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, bookkeeping = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync
    if getattr(sample, "_oasiskv", False) or not current_platform.is_cpu():
        return

    def thrown_away(runner: Any) -> dict[int, torch.Generator]:
        mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        return {i: g for i, g in runner.input_batch.generators.items() if i < len(mask) and mask[i]}

    @functools.wraps(sample)
    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in thrown_away(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def bookkeeping_without_them(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, hidden = self.input_batch.generators, thrown_away(self)
        self.input_batch.generators = {i: g for i, g in generators.items() if i not in hidden}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    sample_and_rewind._oasiskv = True  # type: ignore[attr-defined]
    GPUModelRunner._sample = sample_and_rewind  # type: ignore[method-assign]
    GPUModelRunner._bookkeeping_sync = bookkeeping_without_them  # type: ignore[method-assign]
