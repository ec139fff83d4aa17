"""A cell of a benchmark: one workload at one size, and the jobs that its rows are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from oasiskv.bench.job import DENSE, LIMIT, OASIS, PLUS, Job
from oasiskv.bench.workloads import Source, Workload, conversations, random_tokens
from oasiskv.core.geometry import Geometry, blocks_for
from oasiskv.core.model_shape import read_shape
from oasiskv.core.settings import Settings

STOCK_BLOCK = 128
"""vLLM's own block size on a CPU."""
OASIS_BLOCK = 32
"""OasisKV's own."""
HOST_SPARE = 1.2
"""The host pool: the KV of all requests in flight, their summaries, and a little more; and those of the device pool."""
CHUNK = 2048
"""Most tokens of one step: what vLLM's server takes on a CPU."""
LIMIT_TOKENS = 40
"""Output of each request of the row `limit`."""
AUTO = "auto"
"""vLLM's dtype where none is asked for: the model's own."""


class BenchError(ValueError):
    """The benchmark that was asked for cannot be run. The message names the value, what is allowed and the fix."""


def dtype_of(options: Sequence[str]) -> str:
    """The type of weights and KV cache that vLLM's options ask for."""
    return next((value for name, value in itertools.pairwise(options) if name == "--dtype"), AUTO)


@dataclass(frozen=True)
class Model:
    """What a benchmark needs to know of a model: its folder, its name for people, and its size."""

    name: str
    folder: str
    token_bytes: int
    context: int
    vocabulary: int

    @classmethod
    def of(cls, name: str, folder: str, config: dict[str, Any], dtype: str = AUTO) -> Model:
        """From a Hugging Face ``config``. Sliding layers are counted as if they kept everything: the pool holds them.

        Raises:
            SettingsError: a field is missing, or it is a model that OasisKV refuses.
        """
        shape = read_shape(name, config)
        item_bytes = 4 if dtype in ("float32", "float") else 2  # vLLM's `auto` makes 2 bytes of 4
        layers = shape.layers + shape.sliding_layers
        token_bytes = 2 * layers * shape.kv_heads * shape.head_dim * item_bytes
        return cls(name, folder, token_bytes, shape.max_context, shape.vocabulary)


@dataclass(frozen=True)
class Cell:
    """One workload at one size. ``pool_bytes`` is the KV pool of every row, ``host_bytes`` OasisKV's host pool.

    ``stretch``: let the model run on contexts beyond its own. ``rate``: requests per second (`serve` only).
    """

    workload: Workload
    requests: int
    concurrency: int
    settings: dict[str, Any]
    pool_bytes: int
    host_bytes: int
    options: tuple[str, ...] = ()
    stretch: bool = False
    rate: float = 1.0

    @property
    def budget(self) -> int:
        """Tokens."""
        return Settings.parse(self.settings).budget_tokens

    @property
    def title(self) -> str:
        """For people."""
        w = self.workload
        turns = f", {w.turns} turns" if w.turns > 1 else ""
        return (
            f"{w.name}: {self.requests} requests ({self.concurrency} at once) of {w.prompt:,} + {w.output:,} "
            f"tokens{turns}, budget {self.budget:,}"
        )

    def with_dtype(self, dtype: str) -> Cell:
        """The same with this type of weights and KV cache; `auto` is what an engine takes by itself."""
        return self if dtype == AUTO else replace(self, options=(*self.options, "--dtype", dtype))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        w = self.workload
        return {
            "title": self.title,
            "workload": w.name,
            "prompt_tokens": w.prompt,
            "output_tokens": w.output,
            "turns": w.turns,
            "context": w.context,
            "requests": self.requests,
            "concurrency": self.concurrency,
            "budget_tokens": self.budget,
            "settings": self.settings,
            "pool_bytes": self.pool_bytes,
            "host_bytes": self.host_bytes,
        }

    def check(self, model: Model) -> None:
        """Refuse what cannot run, before anything is started.

        Raises:
            BenchError: the model's context or the pool is too short for one request.
            SettingsError: the budget leaves no hot slot.
        """
        context = self.workload.context
        Geometry.of(Settings.parse(self.settings), OASIS_BLOCK)
        if context > model.context and not self.stretch:
            way_out = "--stretch (the contexts are drawn, not read)" if self.workload.fill else "another model"
            raise BenchError(
                f"{self.workload.name} needs contexts of {context:,} tokens, {model.name} has {model.context:,}: "
                f"use shorter --prompt and --output, or {way_out}"
            )
        if self.workload.output < 2:
            raise BenchError("--output 1 is not allowed: there is nothing to decode; 2 or more")
        memory = psutil.virtual_memory().available
        if self.pool_bytes + self.host_bytes > memory:
            raise BenchError(
                f"the KV pool of {self.pool_bytes / GIB:.1f} GiB and the host pool of {self.host_bytes / GIB:.1f} GiB "
                f"are more than the {memory / GIB:.1f} GiB that are free: fewer requests at once, or shorter ones"
            )
        need = blocks_for(context, STOCK_BLOCK) * STOCK_BLOCK * model.token_bytes
        if self.pool_bytes < need * POOL_SLACK:
            raise BenchError(
                f"a KV pool of {self.pool_bytes / MIB:,.0f} MiB cannot hold one request of {context:,} tokens "
                f"({need / MIB:,.0f} MiB) beside OasisKV's summaries; allowed is {need * POOL_SLACK / MIB:,.0f} MiB or "
                "more: raise --pool-requests or --pool-gib"
            )

    def has_limit(self, model: Model) -> bool:
        """Whether dense vLLM can run on contexts as long as the budget, and OasisKV's are longer."""
        longest = blocks_for(self.budget + LIMIT_TOKENS, STOCK_BLOCK) * STOCK_BLOCK
        return self.workload.context > self.budget and (longest <= model.context or self.stretch)

    def job(self, row: str, model: Model, source: Source, batch: int = 0) -> Job:
        """The job of a row; ``batch`` only for `limit`: as many requests as OasisKV decoded at once."""
        workload, requests = self.workload, self.requests
        max_model_len = context_for(workload)
        pool, settings = self.pool_bytes, None
        if row == OASIS:
            settings = {**self.settings, "host_gib": self.host_bytes / GIB}
        elif row == PLUS:
            pool += self.host_bytes
        elif row == LIMIT:
            workload = replace(workload, prompt=self.budget, output=LIMIT_TOKENS, turns=1, fill=True)
            source, requests = random_tokens(model.vocabulary), batch
            max_model_len = context_for(workload)
            pool = (batch + 1) * blocks_for(max_model_len, STOCK_BLOCK) * STOCK_BLOCK * model.token_bytes
        engine: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": max(self.concurrency, requests, 2)}
        if self.stretch:
            engine["hf_overrides"] = {"max_position_embeddings": max(max_model_len, model.context)}
        return Job(
            row=row,
            model=model.folder,
            warm_up=max(1, min(self.budget + WARM_UP_BEYOND, max_model_len - WARM_UP_BEYOND)),
            conversations=conversations(workload, requests, source),
            concurrency=max(1, batch) if row == LIMIT else self.concurrency,
            max_model_len=max_model_len,
            kv_bytes=pool,
            settings=settings,
            engine=engine,
            options=self.options,
            fill=workload.fill,
        )


GIB, MIB = 1 << 30, 1 << 20
WARM_UP_BEYOND = 96
"""Tokens by which the warm-up's prompt is longer than the budget, and shorter than what fits."""
POOL_SLACK = 1.2
"""OasisKV's summaries take up to a sixth of the pool."""


def context_for(workload: Workload) -> int:
    """``max_model_len``: the conversation, in whole blocks of either size."""
    return blocks_for(workload.context, STOCK_BLOCK) * STOCK_BLOCK


def pool_tokens(requests: float, workload: Workload) -> int:
    """Tokens of a pool in which stock vLLM holds so many requests to their last token: their blocks, and its empty one.

    ``requests * context`` would lack a few blocks, and one request would be preempted over and over.
    """
    return int(requests * context_for(workload)) + STOCK_BLOCK


def make_cell(
    model: Model,
    workload: Workload,
    requests: int,
    concurrency: int,
    settings: dict[str, Any],
    pool: int | float,
    *,
    options: tuple[str, ...] = (),
    stretch: bool = False,
    rate: float = 1.0,
) -> Cell:
    """A cell with a pool of ``pool`` bytes, cut to whole blocks, and host memory for all requests in flight."""
    unit = STOCK_BLOCK * model.token_bytes
    host = concurrency * blocks_for(workload.context, OASIS_BLOCK) * OASIS_BLOCK * model.token_bytes
    return Cell(
        workload=workload,
        requests=requests,
        concurrency=concurrency,
        settings=settings,
        pool_bytes=int(pool) // unit * unit,
        host_bytes=int(HOST_SPARE * host + (HOST_SPARE - 1) * pool),
        options=options,
        stretch=stretch,
        rate=rate,
    )


ROWS = (DENSE, OASIS, PLUS, LIMIT)
TITLES = {
    DENSE: "dense vLLM",
    OASIS: "OasisKV",
    PLUS: "dense + host",
    LIMIT: "limit",
}
