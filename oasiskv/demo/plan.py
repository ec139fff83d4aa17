"""Which engines the demo compares, and what memory each gets.

row               KV pool              beside it
dense             P                    -
oasis             P                    host pool H
dense_plus_host   P + H                -              on a CPU both are the same memory: no flattering
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oasiskv.bench.cells import CHUNK, OASIS_BLOCK, STOCK_BLOCK, Model
from oasiskv.bench.job import DENSE, OASIS, PLUS, Conversation, Job, Turn
from oasiskv.core.geometry import blocks_for
from oasiskv.demo.documents import Prompt

MODEL = "smollm2"
PROMPT_TOKENS, OUTPUT_TOKENS = 5_800, 64
TITLES = {
    DENSE: "stock vLLM",
    OASIS: "OasisKV",
    PLUS: "stock vLLM + host",
}
POOL_REQUESTS = 2.95
"""The KV pool holds this many requests in full: fewer than three."""
HOST_SPARE = 1.1
"""The host pool: the KV of all requests, and a tenth."""


@dataclass(frozen=True)
class Memory:
    """The demo's memory in bytes: one token's KV, the pool P and the host pool H."""

    token_bytes: int
    pool_bytes: int
    host_bytes: int


def memory_for(token_bytes: int, request_tokens: int, requests: int) -> Memory:
    """The pools for ``requests`` requests that reach ``request_tokens`` tokens each. P is whole blocks of any row."""
    pool = int(POOL_REQUESTS * request_tokens) // STOCK_BLOCK * STOCK_BLOCK
    host = requests * blocks_for(request_tokens, OASIS_BLOCK) * OASIS_BLOCK
    return Memory(token_bytes, pool * token_bytes, int(HOST_SPARE * host * token_bytes))


def make_jobs(
    model: Model, prompts: Sequence[Prompt], output_tokens: int, settings: dict[str, Any]
) -> tuple[Memory, list[Job]]:
    """The three rows."""
    longest = max(len(prompt.ids) for prompt in prompts) + output_tokens
    memory = memory_for(model.token_bytes, longest, len(prompts))
    asked = tuple(Conversation(p.city, (Turn(tuple(p.ids), output_tokens),)) for p in prompts)

    def job(row: str, kv_bytes: int, settings: dict[str, Any] | None = None) -> Job:
        # compiling takes a minute, and gains 5 % at this size
        engine = {"max_num_batched_tokens": CHUNK, "enforce_eager": True}
        return Job(row, model.folder, asked, len(asked), longest, kv_bytes, settings, engine)

    return memory, [
        job(DENSE, memory.pool_bytes),
        job(OASIS, memory.pool_bytes, {**settings, "host_gib": memory.host_bytes / 2**30}),
        job(PLUS, memory.pool_bytes + memory.host_bytes),
    ]
