"""A tiny Llama with random weights, for tests that need an engine but no language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
PAD, BOS, EOS = 0, 1, 2


def make_tiny_llama(
    path: Path, *, seed: int = 0, weight_std: float = 0.12, mixing: float = 1.0, **overrides: Any
) -> Path:
    """Write a Llama of 3 layers x 128, 4 query and 2 KV heads, to ``path`` and return it.

    The weights are larger than an untrained model's, so that attention is peaked and leaving a block out shows.
    Values are about as large as 1, as in trained models: an absolute error says something.

    Args:
        weight_std: standard deviation of the weights; queries and keys get 1.3 times that, values half (and the
            output projection twice).
        mixing: what attention adds, as a share of that. With little of it the next word hangs on the last one, so that
            drafts are accepted and n-grams repeat, while attention itself is as peaked as ever.
        overrides: fields of ``LlamaConfig``, such as ``num_hidden_layers``; ``dtype="bfloat16"`` too.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    } | overrides
    llama = LlamaConfig(**config)
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms
                continue
            factor = {"q_proj": 1.3, "k_proj": 1.3, "v_proj": 0.5, "o_proj": 2.0 * mixing}
            std = weight_std * next((f for part, f in factor.items() if part in name), 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.to(getattr(torch, str(config["dtype"]).removeprefix("torch."))).save_pretrained(path)
    _write_tokenizer(path, llama.vocab_size, llama.max_position_embeddings)
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
