"""A server in processes of its own, for as long as it is needed and no longer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.bench.process import inherited

HOST = "127.0.0.1"
STARTS_WITHIN, STOPS_WITHIN = 900.0, 60.0
"""Seconds until a server is ready, and until it has ended by itself."""
LOG_TAIL = 20
"""Lines of a failed process that are shown."""


class ServingError(RuntimeError):
    """A server or its client ended before its time. The message has the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A running server. ``process`` leads a process group of its own, to which its children belong."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self, path: str, body: bytes | None = None, *, timeout: float) -> bytes:
        """Its answer, past any proxy of the environment; a POST if there is a ``body`` (JSON).

        Raises:
            OSError: it does not answer, or refuses (``urllib.error.HTTPError``).
        """
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
            return bytes(answer.read())

    def check_alive(self) -> None:
        """Raises :class:`ServingError` if it has ended."""
        if self.process.poll() is not None:
            raise self.failed(f"the server ended with status {self.process.returncode}")

    def failed(self, what: str) -> ServingError:
        """An error with the log's last lines."""
        return ServingError(f"{what}; {tail(self.log)}")


def server_command(model: str, engine_options: Sequence[str], settings: Mapping[str, Any] | None) -> list[str]:
    """Stock vLLM's server (``settings`` None) or OasisKV's, by their own commands; host and port are still missing."""
    if settings is None:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *engine_options]
    ours = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "oasiskv.cli.main", "serve", model, *ours, *engine_options]


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start ``command`` on a free port and wait until it is ready; whatever happens, it ends with the block.

    Args:
        command: understands ``--host`` and ``--port``, and answers ``/health`` when it is ready.
        log: file for what it prints.
        environment: added to this process's.

    Raises:
        ServingError: it ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            env={**inherited(), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through us only, and its children can be found
        )
    try:
        server = Server(f"http://{HOST}:{port}", process, log)
        _wait_until_ready(server)
        yield server
    finally:
        _stop(process)


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        server.check_alive()
        with suppress(OSError):  # refused, reset, too slow, 503
            server.ask("/health", timeout=5)
            return
        time.sleep(0.2)
    raise server.failed(f"the server was not ready within {STARTS_WITHIN:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, wait, and end whatever is left of it and its children."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOPS_WITHIN)
    finally:  # a second Ctrl-C does not wait
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path) -> str:
    """The last lines of a log, introduced."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    return "\n".join([f"its log {log} ends with" if lines else f"its log {log} is empty", *lines])
