"""A model's ``config.json``, found without its weights: a file, a folder, a name of ours, or one of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oasiskv.cli.options import UsageError
from oasiskv.models import KNOWN, resolve_model

HUB_SECONDS = 5
WAY_OUT = "give a folder that holds the model, or a config.json"


def load_config(name: str) -> dict[str, Any]:
    """The configuration of the model that ``name`` means.

    Raises:
        UsageError: there is none, or it is no JSON.
        FetchError: one of our names could not be fetched.
    """
    path = Path(resolve_model(name) if name in KNOWN else name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        text = path.read_text(errors="replace")
    elif path.suffix == ".json" or Path(name).is_dir() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = f"; names that need no hub: {', '.join(KNOWN)}"
        raise UsageError(f"no model at {name}: there is no {path}; {WAY_OUT}{known}")
    else:
        text = _from_hub(name)
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a model's configuration: it holds no fields")
    return _completed(config)


def _from_hub(name: str) -> str:
    """One request for one small file, with the user's token and endpoint; the local cache first."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).read_text()
    try:
        answer = get_session().get(
            hf_hub_url(name, "config.json"), headers=build_hf_headers(), timeout=HUB_SECONDS, follow_redirects=True
        )
        answer.raise_for_status()
    except Exception as error:  # no network, offline mode, no such model, no right to it: the same way out
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the configuration of {name} could not be read from the hub ({reason}); {WAY_OUT}") from None
    return str(answer.text)


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the defaults of its architecture where it leaves sizes out (as Gemma 3's does)."""
    text = config.get("text_config") or config
    if "num_attention_heads" in text or not text.get("model_type"):
        return config
    from transformers import AutoConfig

    try:
        full = AutoConfig.for_model(**text).to_dict()
    except (ValueError, TypeError):
        return config
    return {**config, "text_config": full} if "text_config" in config else full
