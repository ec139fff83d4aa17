"""The KV cache spec that brings full-attention layers under our block manager."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.v1.kv_cache_interface import FullAttentionSpec


@dataclass(frozen=True, kw_only=True)
class OasisSpec(FullAttentionSpec):
    """A full-attention layer whose KV may leave the device. Same pages, same sizes as its base."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> OasisSpec:
        """The same layer under our manager."""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.init})
