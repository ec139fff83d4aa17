"""The serving benchmark: both servers answer every request, and none outlives its run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oasiskv.bench import server, serving
from oasiskv.bench.server import ServingError, running, server_command
from oasiskv.bench.serving import Metrics, client_failure, metrics_of, result_of, serve_once

KV_BYTES = 8 << 20
"""More than six requests of the tiny model need: 1,536 bytes a token."""
ENGINE = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(KV_BYTES), "--enforce-eager", "--dtype", "float32"]

STUB = """
import http.server, signal, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # an engine of its own
print("about to start", flush=True)
if "broken" in sys.argv:
    sys.exit("no memory left for the cache")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Stands for a server in the tests of starting and stopping."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ids of the processes that were started; at the test's end none of their groups is left."""
    ids: list[int] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            ids.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield ids
    assert ids
    for _ in range(100):  # what is killed takes a moment to go
        if not alive_groups().intersection(ids):
            break
        time.sleep(0.1)
    assert not alive_groups().intersection(ids)


def alive_groups() -> set[int]:
    """Groups, by their leader's id, in which a process still runs (zombies do not)."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(os.getpgid(process.pid))
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def stub(*options: str) -> list[str]:
    return [sys.executable, "-c", STUB, *options]


@pytest.mark.parametrize("name", ["OasisKV", pytest.param("dense", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("started")
def test_every_request_is_answered(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    settings = {"budget_tokens": 128, "residency": "bounded"} if name == "OasisKV" else None
    log = tmp_path / "server.log"
    found = serve_once(
        str(tiny_llama), ENGINE, settings, prompt_tokens=300, output_tokens=20, requests=6, rate=20.0, seed=1, log=log
    )
    assert (found.completed, found.failed, found.preemptions) == (6, 0, 0)
    assert found.request_throughput == pytest.approx(6 / found.duration)
    assert found.output_throughput == pytest.approx(6 * 20 / found.duration)
    for percentiles in (found.ttft, found.tpot, found.itl):
        assert 0 < percentiles[0] <= percentiles[1] <= percentiles[2]
    if settings is None:
        assert found.counters == {}
        assert "kv_connector" not in log.read_text()
    else:
        assert found.counters["sparse_steps_total"] > 0
        assert found.counters["acknowledged_blocks_total"] >= 6 * (300 // 32 - 4)
        assert found.counters["host_blocks_total"] > found.counters["host_blocks_used"] == 0, "all requests have left"


@pytest.mark.usefixtures("started")
def test_a_server_that_cannot_start_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"ended with status \d+; its log .*ends with(.|\n)*no-such-option"):
        serve_once(str(tiny_llama), ["--no-such-option"], None, 10, 1, 1, 1.0, 0, tmp_path / "server.log")


# --- starting and stopping


@pytest.mark.usefixtures("started")
def test_a_server_is_reached_and_ends_with_its_children(tmp_path: Path, started: list[int]) -> None:
    with running(stub(), tmp_path / "log") as found:
        assert found.ask("/health", timeout=5) == b""
        with pytest.raises(urllib.error.HTTPError):
            found.ask("/nothing", timeout=5)
        assert started[0] in alive_groups()


@pytest.mark.usefixtures("started")
def test_one_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOPS_WITHIN", 0.3)
    with running(stub("stubborn"), tmp_path / "log"):
        pass


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_ends_on_ctrl_c_and_on_errors(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), running(stub(), tmp_path / "log"):
        raise error


@pytest.mark.usefixtures("started")
def test_one_that_dies_at_the_start_leaves_its_last_words_and_nothing_else(tmp_path: Path) -> None:
    words = r"status 1; its log .*\nabout to start\nno memory left for the cache$"
    with pytest.raises(ServingError, match=words), running(stub("broken"), tmp_path / "log"):
        pass


@pytest.mark.usefixtures("started")
def test_waiting_for_it_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STARTS_WITHIN", 0.5)
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(ServingError, match="not ready within"), running(silent, tmp_path / "log"):
        pass


@pytest.mark.usefixtures("started")
def test_one_that_dies_during_the_run_ends_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CLIENT", "import time; time.sleep(600)")
    load = serving._Load("m", 10, 1, 1, 1.0, 0, 1)
    with running(stub(), tmp_path / "log") as found:
        threading.Timer(0.5, found.process.kill).start()
        with pytest.raises(ServingError, match="the server ended with status"):
            serving._run_client(found, load)


# --- what is started and what comes back


def test_each_server_is_started_by_its_own_command() -> None:
    dense, oasis = (server_command("m", ["--port", "1"], s)[1:] for s in (None, {"budget_tokens": 512, "host_gib": 2}))
    assert dense == ["-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--port", "1"]
    assert oasis == [
        "-m", "oasiskv.cli.main", "serve", "m", "--budget-tokens", "512", "--host-gib", "2", "--port", "1",
    ]  # fmt: skip


def test_milliseconds_become_seconds_and_the_warm_up_is_taken_off() -> None:
    seen = {"request_throughput": 2.0, "output_throughput": 40.0, "completed": 5, "failed": 1, "duration": 2.5}
    for i, metric in enumerate(("ttft", "tpot", "itl"), 1):
        seen |= {f"p{p}_{metric}_ms": 1000.0 * i + p for p in (50, 95, 99)}
    before = Metrics({"vllm:num_preemptions_total": 1.0, "vllm:oasis_hits_total": 10.0}, {"vllm:oasis_used": 7.0})
    after = Metrics({"vllm:num_preemptions_total": 3.0, "vllm:oasis_hits_total": 25.0}, {"vllm:oasis_used": 2.0})
    found = result_of(seen, before, after)
    assert found.ttft == (1.05, 1.095, 1.099) and found.tpot[0] == 2.05 and found.itl[2] == 3.099
    assert (found.completed, found.failed, found.duration, found.preemptions) == (5, 1, 2.5, 2)
    assert found.counters == {"hits_total": 15.0, "used": 2.0}


def test_a_gauge_is_known_by_its_type_not_by_its_name() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

    registry = CollectorRegistry()
    hits = Counter("vllm:oasis_hits", "", ["engine"], registry=registry)
    Gauge("vllm:oasis_host_blocks_total", "", registry=registry).set(50)
    Gauge("vllm:requests_running", "", registry=registry).set(3)
    Counter("vllm:num_preemptions", "", registry=registry).inc(2)
    hits.labels("0").inc(3)
    hits.labels("1").inc(4)
    assert metrics_of(generate_latest(registry).decode()) == Metrics(
        counters={"vllm:oasis_hits_total": 7.0, "vllm:num_preemptions_total": 2.0},
        gauges={"vllm:oasis_host_blocks_total": 50.0},
    )


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("ModuleNotFoundError: No module named 'pandas'\n", "not installed: pip install pandas"),
        ("ImportError: Please install vllm[bench] for bench support\n", r"not installed: pip install vllm\[bench\]"),
        ("ValueError: too small\n", r"status 1; its log (.|\n)*ValueError: too small"),
    ],
)
def test_a_client_that_fails_says_why(tmp_path: Path, printed: str, message: str) -> None:
    log = tmp_path / "log"
    log.write_text(printed)
    with pytest.raises(ServingError, match=message):
        raise ServingError(client_failure(log, 1))
