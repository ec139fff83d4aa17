"""What of a model decides its memory and time: read from a Hugging Face ``config.json``, no weights needed.

Parameters are those of the matrices; norms, biases and a vision tower are left out (a decoder's norms and biases are
less than 0.1 % of it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oasiskv.core.settings import SettingsError

Config = Mapping[str, Any]
SLIDING_PATTERN = {"gemma2": 2, "gemma3_text": 6}
"""Every n-th layer is full attention, in configurations without ``layer_types``. Source: transformers' defaults."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention. Sizes are those of the whole model, over all devices.

    ``layers`` are the full-attention layers, whose KV grows and is OasisKV's; ``sliding_layers`` keep
    ``sliding_window`` tokens. ``resident_params`` are read whenever a step runs (attention, dense MLPs, shared experts,
    routers, the output matrix), ``expert_params`` are those of all routed experts, ``embedding_params`` only lie there
    (0 if the table is also the output matrix). ``weight_bytes`` and ``kv_item_bytes``: bytes of one number.
    """

    name: str
    layers: int
    sliding_layers: int
    sliding_window: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_context: int
    resident_params: int
    embedding_params: int
    expert_params: int = 0
    experts: int = 0
    experts_per_token: int = 0
    weight_bytes: float = 2.0
    kv_item_bytes: int = 2
    summary_dtype: str = "bfloat16"
    """What the setting ``summary_dtype=auto`` means for this model."""

    @property
    def params(self) -> int:
        """Parameters in all."""
        return self.resident_params + self.embedding_params + self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with: all read ones of a dense model, the routed share of a MoE."""
        routed = self.expert_params * self.experts_per_token // self.experts if self.experts else 0
        return self.resident_params + routed

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return round(self.params * self.weight_bytes)

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a step of ``rows`` tokens reads: each matrix once, of the experts those that are hit.

        With uniform, independent routing each expert is missed by all rows with probability ``(1 - k / E) ** rows``.
        """
        hit = 1 - (1 - self.experts_per_token / self.experts) ** rows if self.experts else 0.0
        return (self.resident_params + self.expert_params * hit) * self.weight_bytes

    def page_bytes(self, block_size: int) -> int:
        """K and V bytes of one block in one layer for one KV head."""
        return 2 * block_size * self.head_dim * self.kv_item_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that each token adds to the KV that grows."""
        return self.layers * self.kv_heads * self.page_bytes(1)

    def sliding_bytes(self, context: int) -> int:
        """KV bytes of the sliding-window layers of one request: constant beyond the window."""
        return self.sliding_layers * self.kv_heads * self.page_bytes(min(context, self.sliding_window))

    def attention_flops(self, attended: float, context: float) -> float:
        """FLOPs of one row's attention: q.k and p.v, 2 FLOPs a number each, over ``attended`` tokens of the full
        layers."""
        tokens = self.layers * attended + self.sliding_layers * min(context, self.sliding_window)
        return 4 * self.heads * self.head_dim * tokens

    def prefill_flops(self, prompt: int) -> float:
        """FLOPs of one prompt: 2 per parameter and token (the output matrix for one token), and causal attention."""
        output = self.vocabulary * self.hidden
        attention = prompt * self.attention_flops(prompt / 2, prompt)
        return 2 * (self.active_params - output) * prompt + 2 * output + attention

    def split(self, devices: int) -> ModelShape:
        """The model on ``devices`` tensor-parallel devices: KV heads are copied where there are more devices."""
        return replace(self, kv_heads=max(self.kv_heads, devices))


def read_shape(name: str, config: Config, *, weight_bits: float | None = None, kv_item_bytes: int = 2) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Args:
        weight_bits: bits of one weight; None: what the configuration says, 16 if it says nothing. All weights alike.

    Raises:
        SettingsError: a field is missing, or it is a model that OasisKV refuses.
    """
    text = config.get("text_config") or config
    _refuse_unsupported(name, text)
    number = _numbers(name, text)
    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    heads = number("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    full = _full_layers(name, text, layers)
    window = text.get("sliding_window") or text.get("attention_chunk_size") or 0
    if full == 0:
        raise SettingsError(f"{name} has no full-attention layer: its KV does not grow, there is nothing to bound")
    vocabulary = number("vocab_size")
    table = vocabulary * hidden
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    attention = layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp, routed, experts, per_token = _mlp_params(text, layers, hidden, number)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
    return ModelShape(
        name=name,
        layers=full,
        sliding_layers=layers - full,
        sliding_window=window if full < layers else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocabulary=vocabulary,
        max_context=_max_context(text, number),
        resident_params=attention + mlp + table,
        embedding_params=0 if tied else table,
        expert_params=routed,
        experts=experts,
        experts_per_token=per_token,
        weight_bytes=(weight_bits or _weight_bits(name, config)) / 8,
        kv_item_bytes=kv_item_bytes,
        summary_dtype="float32" if dtype.endswith("float32") else "bfloat16",
    )


def _refuse_unsupported(name: str, text: Config) -> None:
    reasons = {
        "latent attention (MLA), whose KV has no heads": text.get("kv_lora_rank"),
        "an encoder beside its decoder": text.get("is_encoder_decoder"),
        "ALiBi, which needs every token's position": text.get("alibi"),
        "KV shared across layers": text.get("num_kv_shared_layers"),
    }
    for reason, found in reasons.items():
        if found:
            raise SettingsError(f"{name} has {reason}: OasisKV does not support it; run it with stock vLLM")


def _weight_bits(name: str, config: Config) -> float:
    """Bits of one weight, by the ways in which quantised checkpoints say it."""
    said = config.get("quantization_config")
    if not said:
        return 16
    groups = (said.get("config_groups") or {}).values()  # compressed-tensors
    bits = said.get("bits") or said.get("w_bit") or next((g["weights"]["num_bits"] for g in groups), None)
    found = bits or {"fp8": 8, "mxfp4": 4.25}.get(said.get("quant_method", ""))  # 4 bits, and a scale for 32 numbers
    if not isinstance(found, int | float) or found <= 0:
        raise SettingsError(f"{name} is quantised in a way that says no bits: give --weight-bits, such as 8 or 4")
    return found


def _numbers(name: str, text: Config) -> Any:
    def number(field: str) -> int:
        value = text.get(field)
        if not isinstance(value, int) or value <= 0:
            raise SettingsError(f"the configuration of {name} has {field}={value!r}; needed is a whole number above 0")
        return value

    return number


def _full_layers(name: str, text: Config, layers: int) -> int:
    """How many layers attend to the whole context."""
    kinds = text.get("layer_types")
    if kinds:
        others = sorted(set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"})
        if others:
            raise SettingsError(f"{name} has layers of kind {', '.join(others)}; allowed are full and sliding ones")
        return int(sum(kind == "full_attention" for kind in kinds))
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return layers
    if text.get("use_sliding_window"):
        return min(layers, text.get("max_window_layers", layers))
    pattern = text.get("sliding_window_pattern") or SLIDING_PATTERN.get(text.get("model_type", ""))
    return layers // pattern if pattern else 0


def _mlp_params(text: Config, layers: int, hidden: int, number: Any) -> tuple[int, int, int, int]:
    """Parameters that every token passes, those of all routed experts, the experts, and those a token takes."""
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    if not experts:
        return layers * 3 * hidden * number("intermediate_size"), 0, 0, 0
    per_token = _first(text, "num_experts_per_tok", "experts_per_token", "num_experts_per_token") or 1
    width = text.get("moe_intermediate_size") or number("intermediate_size")
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * width
    dense = text.get("first_k_dense_replace") or len(text.get("mlp_only_layers") or ())
    sparse = (layers - dense) // (text.get("decoder_sparse_step") or 1)
    resident = sparse * hidden * (3 * shared + experts)
    if sparse < layers:
        resident += (layers - sparse) * 3 * hidden * number("intermediate_size")
    return resident, sparse * experts * 3 * hidden * width, experts, per_token


def _first(text: Config, *fields: str) -> int:
    return int(next((text[field] for field in fields if text.get(field)), 0))


def _max_context(text: Config, number: Any) -> int:
    """Longest context, as vLLM derives it: YaRN stretches the original one."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    original = scaling.get("original_max_position_embeddings")
    if (scaling.get("rope_type") or scaling.get("type")) == "yarn" and original and scaling.get("factor"):
        return int(original * scaling["factor"])
    return int(number("max_position_embeddings"))
