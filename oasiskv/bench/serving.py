"""vLLM's own benchmark client against a server, with requests that arrive at random times (Poisson).

Stock vLLM's server and OasisKV's are started alike, by their own commands; the client is ``vllm bench serve``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.bench.server import HOST, Server, ServingError, running, server_command, tail
from oasiskv.models import resolve_model

PERCENTILES = (50, 95, 99)
METRICS = ("ttft", "tpot", "itl")
WARM_UP_TOKENS = 16
ANSWERS_WITHIN = 3600.0
"""Seconds that the warm-up may take."""
PREEMPTIONS, OURS = "vllm:num_preemptions_total", "vllm:oasis_"

# What `vllm bench serve` does. In the CPU build of 0.32 the command itself does not start: it looks for the version of
# a distribution named "vllm", which is not there.
CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""

Percentiles = tuple[float, float, float]


@dataclass(frozen=True)
class ServingResult:
    """What the client saw, and what the server counted meanwhile (the warm-up not among it).

    Throughputs per second, of requests and of output tokens, over ``duration`` (seconds, from the first request to the
    last answer). ``ttft`` (time to first token), ``tpot`` (time per output token after it) and ``itl`` (between two
    pieces of an answer): seconds at the 50th, 95th and 99th percentile. ``counters``: ``vllm:oasis_*`` by the rest of
    their names, gauges as they were at the end; empty for stock vLLM.
    """

    request_throughput: float
    output_throughput: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    completed: int
    failed: int
    duration: float
    preemptions: int
    counters: dict[str, float]


@dataclass(frozen=True)
class Metrics:
    """Of a server, by name: what is added up since its start, and what is the case now."""

    counters: dict[str, float]
    gauges: dict[str, float]


@dataclass(frozen=True)
class _Load:
    """What the client sends: ``rate`` requests per second on average (infinite: all at once)."""

    model: str
    prompt_tokens: int
    output_tokens: int
    requests: int
    rate: float
    seed: int
    concurrency: int


def serve_once(
    model: str,
    engine_options: list[str],
    settings: dict[str, Any] | None,
    prompt_tokens: int,
    output_tokens: int,
    requests: int,
    rate: float,
    seed: int,
    log: Path,
    concurrency: int | None = None,
) -> ServingResult:
    """Start a server, let the client send it ``requests`` requests, and stop it.

    Args:
        model: a folder, or a name as everywhere else.
        engine_options: options of ``vllm serve``; ``--kv-cache-memory-bytes`` gives both servers the same pool.
        settings: OasisKV's; None: stock vLLM, the plug-in not even loaded.
        prompt_tokens, output_tokens: of every request; the end of text is ignored.
        rate: requests per second, on average; infinite: all at once.
        seed: of prompts and arrivals, which are the same for every server.
        concurrency: most requests in flight; None: all.
        log: file for what the server prints; the client's is beside it, with ``.client`` at its end.

    Raises:
        ServingError: the server did not start, or it or the client broke off, or no request was answered.
        FetchError: the model cannot be fetched.
    """
    load = _Load(resolve_model(model), prompt_tokens, output_tokens, requests, rate, seed, concurrency or requests)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # vLLM's server knows no other way
    if settings is None:
        environment["VLLM_PLUGINS"] = ""
    with running(server_command(load.model, engine_options, settings), log, environment) as server:
        _warm_up(server, load)
        before = read_metrics(server)
        seen = _run_client(server, load)
        after = read_metrics(server)
    if not seen["completed"]:
        raise server.failed(f"none of {requests} requests was answered by the server")
    if seen["failed"]:
        raise server.failed(f"{seen['failed']} of {requests} requests were refused or broke off")
    return result_of(seen, before, after)


def result_of(seen: dict[str, Any], before: Metrics, after: Metrics) -> ServingResult:
    """Out of the client's JSON and the server's metrics before and after."""
    counted = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}

    def percentiles(metric: str) -> Percentiles:
        p50, p95, p99 = (seen[f"p{p}_{metric}_ms"] / 1000 for p in PERCENTILES)
        return p50, p95, p99

    return ServingResult(
        request_throughput=seen["request_throughput"],
        output_throughput=seen["output_throughput"],
        ttft=percentiles("ttft"),
        tpot=percentiles("tpot"),
        itl=percentiles("itl"),
        completed=seen["completed"],
        failed=seen["failed"],
        duration=seen["duration"],
        preemptions=int(counted.pop(PREEMPTIONS, 0)),
        counters={name.removeprefix(OURS): value for name, value in {**counted, **after.gauges}.items()},
    )


def _warm_up(server: Server, load: _Load) -> None:
    """One request that shares no prefix with the client's: what happens only once is not measured."""
    body = {
        "model": load.model,
        "prompt": [100] * load.prompt_tokens,
        "max_tokens": min(load.output_tokens, WARM_UP_TOKENS),
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        server.ask("/v1/completions", json.dumps(body).encode(), timeout=ANSWERS_WITHIN)
    except urllib.error.HTTPError as error:
        raise ServingError(f"the server refuses the first request: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        time.sleep(1)  # its end may follow the broken connection
        server.check_alive()
        raise server.failed(f"the server does not answer the first request ({error})") from None


def _run_client(server: Server, load: _Load) -> dict[str, Any]:
    """vLLM's benchmark client to its end; its result as it writes it."""
    log = server.log.with_name(f"{server.log.name}.client")
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "base-url": server.url, "model": load.model, "dataset-name": "random", "seed": load.seed,
            "input-len": load.prompt_tokens, "output-len": load.output_tokens,
            "num-prompts": load.requests, "request-rate": load.rate, "temperature": 0,
            "max-concurrency": load.concurrency,
            "percentile-metrics": ",".join(METRICS), "metric-percentiles": ",".join(map(str, PERCENTILES)),
            "result-dir": folder, "result-filename": "result.json",
        }  # fmt: skip
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with log.open("wb") as printed:
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT, *given, "--ignore-eos", "--save-result", "--disable-tqdm"],
                env={**os.environ, "NO_PROXY": HOST, "no_proxy": HOST, "VLLM_PLUGINS": ""},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
        try:
            while client.poll() is None:
                server.check_alive()
                time.sleep(0.2)
        finally:
            if client.poll() is None:
                client.kill()
            client.wait()
        result = Path(folder, "result.json")
        if client.returncode != 0 or not result.is_file():
            raise ServingError(client_failure(log, client.returncode))
        return dict(json.loads(result.read_text()))


def client_failure(log: Path, status: int) -> str:
    """Why vLLM's client ended: the package it lacks, or the last lines of its log."""
    if missing := re.search(r"No module named '([\w.]+)'|install (vllm\[\w+\])", log.read_text(errors="replace")):
        return f"vLLM's benchmark client needs a package that is not installed: pip install {missing[1] or missing[2]}"
    return f"vLLM's benchmark client ended with status {status}; {tail(log)}"


def read_metrics(server: Server) -> Metrics:
    """Of a running server."""
    return metrics_of(server.ask("/metrics", timeout=60).decode())


def metrics_of(text: str) -> Metrics:
    """Preemptions and ``vllm:oasis_*``, added up over engines."""
    from prometheus_client.parser import text_string_to_metric_families

    found = Metrics({}, {})
    for family in text_string_to_metric_families(text):
        kind = found.counters if family.type == "counter" else found.gauges
        for name, value in ((sample.name, sample.value) for sample in family.samples):
            if name == PREEMPTIONS or (name.startswith(OURS) and not name.endswith("_created")):
                kind[name] = kind.get(name, 0.0) + value
    return found
