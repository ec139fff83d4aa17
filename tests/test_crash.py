"""Clients that hang up and processes that are killed: nothing of theirs is left behind, and the next start works."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_server import LIMITS, SETTINGS, Server

ENDS_WITHIN = 60


def start(model: Path, log: Path) -> Server:
    settings = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "oasiskv.cli.main", "serve", str(model), *settings, *LIMITS]
    server = Server([*command, "--served-model-name", "tiny"], log)
    server.wait_until_ready()
    return server


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    running = start(tiny_llama, tmp_path / "server.log")
    try:
        yield running
    finally:
        running.kill()


def stream(server: Server, tokens: int) -> Iterator[bytes]:
    """Lines of an answer, as they come; closing the iterator closes the connection."""
    body = {"model": "tiny", "prompt": [5 + 7 * i % 500 for i in range(600)], "max_tokens": tokens, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        yield from answer


def family(server: Server) -> list[psutil.Process]:
    """The server's process and all below it."""
    head = psutil.Process(server.process.pid)
    return [head, *head.children(recursive=True)]


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in the system's shared memory that any of the processes has mapped; other programs have some, too."""
    mapped = {Path(region.path) for process in processes for region in process.memory_maps()}
    return {path for path in mapped if path.is_relative_to("/dev/shm")}


def test_a_client_that_hangs_up_and_an_engine_that_is_killed(server: Server, tiny_llama: Path, tmp_path: Path) -> None:
    lines = stream(server, tokens=1400)
    for _ in range(60):
        next(lines)
    lines.close()  # type: ignore[attr-defined]
    counters = server.counters()
    for _ in range(ENDS_WITHIN * 10):
        counters = server.counters()
        if counters["host_blocks_used"] == counters["bounded_requests"] == 0:
            break
        assert sum(1 for _ in stream(server, tokens=1))  # gauges are sent with steps
        time.sleep(0.1)
    assert counters["host_blocks_used"] == counters["bounded_requests"] == 0, counters

    processes = family(server)
    (core,) = [process for process in processes if "EngineCore" in " ".join(process.cmdline()) + process.name()]
    lines = stream(server, tokens=1400)
    for _ in range(20):
        next(lines)
    core.kill()
    with contextlib.suppress(OSError, http.client.HTTPException):  # the stream breaks off, or ends with an error
        list(lines)
    _, alive = psutil.wait_procs(processes, timeout=ENDS_WITHIN)
    assert not alive, f"still there: {alive}"

    again = start(tiny_llama, tmp_path / "again.log")
    try:
        assert sum(line.startswith(b"data:") for line in stream(again, tokens=40)) > 10
        processes = family(again)
        mapped = shared_memory(processes)
    finally:
        again.process.terminate()
        try:
            assert again.process.wait(ENDS_WITHIN) in (0, -15)
        finally:
            again.kill()
    _, alive = psutil.wait_procs(processes, timeout=ENDS_WITHIN)  # workers and their resource tracker end after it
    assert not alive, f"still there: {alive}"
    assert mapped, "an engine shares memory with its workers"
    assert not [path for path in mapped if path.exists()]
