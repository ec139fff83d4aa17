"""A GGUF file made into a Hugging Face folder that transformers and vLLM load as any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from oasiskv.models.cache import FetchError

ERROR_MARK = "oasiskv: "


def convert_in_subprocess(gguf: Path, folder: Path) -> None:
    """:func:`gguf_to_folder` in a process of its own.

    So torch is not loaded, nor the memory kept, in a process that is about to start an engine.

    Raises:
        FetchError: the conversion failed; the message ends with its reason.
    """
    command = [sys.executable, "-m", "oasiskv.models.convert", str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    if lines[-1].startswith(ERROR_MARK):
        raise FetchError(lines[-1].removeprefix(ERROR_MARK))
    raise FetchError(
        f"converting {gguf.name} failed: {lines[-1]}; free memory (about six times the download) and disk are the "
        f"usual reasons; the whole log: python -m oasiskv.models.convert GGUF_FILE FOLDER"
    )


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """Write config, bfloat16 weights, tokenizer, chat template and generation config of ``gguf`` to ``folder``.

    Raises:
        FetchError: a package needed for the conversion is missing, or the file has no chat template.
    """
    try:
        import accelerate  # noqa: F401  (transformers needs it to load a GGUF file)
        import gguf as gguf_reader
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise FetchError(
            f"converting a model needs transformers, accelerate and gguf ({error}); "
            "install them with: pip install 'oasiskv[cpu]' (or 'oasiskv[cuda]')"
        ) from error

    metadata = {name: field.contents() for name, field in gguf_reader.GGUFReader(gguf).fields.items() if _small(name)}
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The weights are plain bfloat16 now; a config that still says "gguf" would make loaders look for one.
    for config in (model.config, model):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    model.hf_quantizer = None
    _stop_at_end_of_turn(model, tokenizer)
    _split_digits_as_trained(tokenizer, metadata)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if not tokenizer.chat_template:
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    if not tokenizer.chat_template:
        raise FetchError(f"{gguf.name} has no chat template")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_and_clean_config(folder / "config.json", metadata)
    (folder / "model.safetensors").chmod(0o644)


def _small(field: str) -> bool:
    return field.startswith(("general.", "llama.", "qwen2.")) or field in (
        "tokenizer.chat_template",
        "tokenizer.ggml.pre",
    )


def _stop_at_end_of_turn(model: Any, tokenizer: Any) -> None:
    """A chat turn ends with ``<|im_end|>``, plain text with ``<|endoftext|>``; generation stops at either."""
    vocabulary = tokenizer.get_vocab()
    stops = [vocabulary[token] for token in ("<|im_end|>", "<|endoftext|>") if token in vocabulary]
    generation = model.generation_config
    generation._from_model_config = False  # else loaders derive it anew, with a single stop token
    generation.eos_token_id = stops or tokenizer.eos_token_id
    generation.bos_token_id = tokenizer.bos_token_id
    generation.pad_token_id = tokenizer.pad_token_id


def _split_digits_as_trained(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """SmolLM was trained with every digit a word of its own, which the conversion does not carry over."""
    if metadata.get("tokenizer.ggml.pre") != "smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_and_clean_config(file: Path, metadata: dict[str, Any]) -> None:
    config = json.loads(file.read_text())
    config.pop("_model_name_or_path", None)
    config.pop("quantization_config", None)
    context = metadata.get(f"{metadata['general.architecture']}.context_length")
    if config["max_position_embeddings"] != context:
        raise FetchError(f"converted context length is {config['max_position_embeddings']}, the file says {context}")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _main(arguments: list[str]) -> int:
    gguf, folder = arguments
    try:
        gguf_to_folder(Path(gguf), Path(folder))
    except FetchError as error:
        print(f"{ERROR_MARK}{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
