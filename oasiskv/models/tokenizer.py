"""A model's tokenizer, for long texts."""

from __future__ import annotations

from typing import Any


def load_tokenizer(folder: str) -> Any:
    """The Hugging Face tokenizer of a model's folder. Texts may be longer than the model's context: only pieces of
    them are used, so it does not warn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 1 << 30
    return tokenizer
