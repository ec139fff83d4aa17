"""A context's keys and values: computed once, densely, and then followed by several batch rows, each with its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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

    def prompt_keys(self) -> Tensor:
        """Keys of the shared blocks: ``[n, block_size, Hkv, D]``."""
        return self._shared[0].transpose(0, 1).unflatten(0, (-1, self.block_size))

    def block_keys(self, batch_row: int, block: int) -> Tensor:
        """The same of one later block, as this batch row has it: ``[1, block_size, Hkv, D]``."""
        start = block * self.block_size - self.shared
        return self._own[0][batch_row, :, start : start + self.block_size].transpose(0, 1).unsqueeze(0)
