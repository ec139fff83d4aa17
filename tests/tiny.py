"""Tiny models with random weights, for tests that need an engine but no language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
PAD, BOS, EOS = 0, 1, 2


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 128,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
}
"""Configuration, model, and what differs from the tiny Llama."""


def make_tiny_llama(path: Path, **options: Any) -> Path:
    """:func:`make_tiny_model` of kind ``llama``."""
    return make_tiny_model(path, "llama", **options)


def make_tiny_model(
    path: Path, kind: str, *, seed: int = 0, weight_std: float = 0.12, mixing: float = 1.0, **overrides: Any
) -> Path:
    """Write a model of 3 layers x 128, 4 query and 2 KV heads, to ``path`` and return it.

    The weights are larger than an untrained model's, so that attention is peaked and leaving a block out shows.
    Values are about as large as 1, as in trained models: an absolute error says something.

    Args:
        kind: one of ``KINDS``.
        weight_std: standard deviation of the weights; queries and keys get 1.3 times that, values half (and the
            output projection twice).
        mixing: what attention adds, as a share of that. With little of it the next word hangs on the last one, so that
            drafts are accepted and n-grams repeat, while attention itself is as peaked as ever.
        overrides: fields of the configuration, such as ``num_hidden_layers``; ``dtype="bfloat16"`` too.
    """
    import torch
    import transformers

    config_class, model_class, own = KINDS[kind]
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    fields |= ({"rope_theta": 10_000.0} if kind != "gemma3" else {}) | own | overrides
    config = getattr(transformers, config_class)(**fields)
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms
                continue
            factor = {"q_proj": 1.3, "k_proj": 1.3, "v_proj": 0.5, "o_proj": 2.0 * mixing}
            std = weight_std * next((f for part, f in factor.items() if part in name), 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.to(getattr(torch, str(fields["dtype"]).removeprefix("torch."))).save_pretrained(path)
    _write_tokenizer(path, config.vocab_size, config.max_position_embeddings)
    return path


def _write_tokenizer(path: Path, vocabulary: int, context: int) -> None:
    """Every token is a word: ``t37`` is 37."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": 3} | {f"t{i}": i for i in range(4, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=context,
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(path)
