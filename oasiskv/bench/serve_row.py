"""A row of the workload `serve`: a server, vLLM's own client, and what both say as :class:`Figures`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from oasiskv.bench.cells import Cell, Model
from oasiskv.bench.figures import Figures
from oasiskv.bench.job import OASIS
from oasiskv.bench.serving import ServingResult, serve_once
from oasiskv.bench.workloads import random_tokens

SLACK = 128
"""The client's random prompts can come back a few tokens longer than they were asked for."""


def serve_row(cell: Cell, row: str, model: Model, number: int, title: str, console: Console) -> Figures:
    """Serve the cell's requests once. ``number`` of the round is the seed: rows of a round get the same requests.

    Raises:
        ServingError: a server or the client broke off.
    """
    job = cell.job(row, model, random_tokens(model.vocabulary))
    options = [
        "--kv-cache-memory-bytes", str(job.kv_bytes), "--max-model-len", str(job.max_model_len + SLACK),
        "--max-num-seqs", str(job.engine["max_num_seqs"]), *cell.options,
    ]  # fmt: skip
    w = cell.workload
    with tempfile.TemporaryDirectory() as folder, console.status(f"{title}: serving"):
        found = serve_once(
            model.folder,
            options,
            job.settings,
            w.prompt,
            w.output,
            cell.requests,
            cell.rate,
            number,
            Path(folder, "log"),
            cell.concurrency,
        )
    console.print(f"  {title:17s} {found.completed} answered in {found.duration:.0f} s", highlight=False)
    return served(found, cell, row)


def served(found: ServingResult, cell: Cell, row: str) -> Figures:
    """The client's figures; what only an engine that can be looked into would tell is 0."""
    steps = max(1.0, found.counters.get("sparse_steps_total", 0.0))
    fetched = found.counters.get("bytes_fetched_total", 0.0) / steps if row == OASIS else 0.0
    return Figures(
        seconds=found.duration,
        prompt_tokens=cell.workload.prompt * found.completed,
        output_tokens=round(found.output_throughput * found.duration),
        throughput=found.output_throughput,
        decode_throughput=0.0,
        step_ms=0.0,
        batch=0,
        scheduler_ms=0.0,
        beyond_ms=0.0,
        beyond_batch=0,
        ttft=found.ttft,
        tpot=found.tpot,
        running=0,
        decoding=0,
        preemptions=found.preemptions,
        fetched_per_step=fetched,
        pipeline_share=0.0,
        blocks_mean=0.0,
        blocks_most=0,
        load_seconds=0.0,
    )
