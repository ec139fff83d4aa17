"""Which engines the demo compares, and what memory each gets.

row        KV pool              beside it
stock      P                    -
oasis      P                    host pool H
stock+     P + H                -              on a CPU both are the same memory: no flattering
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oasiskv.core.geometry import blocks_for
from oasiskv.demo.documents import FACTS

MODEL = "smollm2"
PROMPT_TOKENS, OUTPUT_TOKENS = 5_800, 64
STOCK, OASIS, STOCK_PLUS = "stock", "oasis", "stock_plus"
TITLES = {
    STOCK: "stock vLLM",
    OASIS: "OasisKV",
    STOCK_PLUS: "stock vLLM + host",
}
STOCK_BLOCK = 128
"""vLLM's own block size on a CPU."""
OASIS_BLOCK = 32
"""OasisKV's own."""
POOL_REQUESTS = 2.95
"""The KV pool holds this many requests in full: fewer than three."""
HOST_SPARE = 1.1
"""The host pool: the KV of all requests, and a tenth."""
CHUNK = 2048
"""Most tokens of one step: what vLLM's server takes on a CPU."""


@dataclass(frozen=True)
class Job:
    """One engine's work, as its process gets it.

    ``kv_bytes``: its KV pool. ``settings``: OasisKV's (None: not switched on; vLLM as it is). ``block_size`` None: the
    engine's own.
    """

    row: str
    model: str
    prompt_tokens: int
    output_tokens: int
    kv_bytes: int
    settings: dict[str, Any] | None = None
    block_size: int | None = None
    facts: tuple[tuple[str, str], ...] = field(default=FACTS)

    def to_json(self) -> str:
        """One line for the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The reverse of :meth:`to_json`."""
        values = json.loads(line)
        values["facts"] = tuple((city, number) for city, number in values["facts"])
        return cls(**values)


@dataclass(frozen=True)
class Memory:
    """The demo's memory in bytes: one token's KV, the pool P and the host pool H."""

    token_bytes: int
    pool_bytes: int
    host_bytes: int


def token_bytes(config: dict[str, Any], item_bytes: int = 2) -> int:
    """Bytes of one token's K and V in all layers, for a Hugging Face ``config``."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * item_bytes)


def memory_for(config: dict[str, Any], request_tokens: int, requests: int) -> Memory:
    """The pools for ``requests`` requests that reach ``request_tokens`` tokens each. P is whole blocks of any row."""
    each = token_bytes(config)
    pool = int(POOL_REQUESTS * request_tokens) // STOCK_BLOCK * STOCK_BLOCK
    host = requests * blocks_for(request_tokens, OASIS_BLOCK) * OASIS_BLOCK
    return Memory(each, pool * each, int(HOST_SPARE * host * each))


def make_jobs(model: str, prompt_tokens: int, output_tokens: int, settings: dict[str, Any]) -> tuple[Memory, list[Job]]:
    """The three rows for a model's folder."""
    config = json.loads((Path(model) / "config.json").read_text())
    memory = memory_for(config, prompt_tokens + output_tokens, len(FACTS))
    settings = {**settings, "host_gib": memory.host_bytes / 2**30}
    common = (model, prompt_tokens, output_tokens)
    return memory, [
        Job(STOCK, *common, memory.pool_bytes),
        Job(OASIS, *common, memory.pool_bytes, settings),
        Job(STOCK_PLUS, *common, memory.pool_bytes + memory.host_bytes),
    ]
