"""Fixtures that more than one test module uses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `from tiny import make_tiny_llama`, from any folder of tests


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama in float32 (3 layers, 4 query and 2 KV heads, context 4,096)."""
    from tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
