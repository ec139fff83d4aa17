"""The OpenAI-compatible server: streams, counts, and ends cleanly; started by our command or by vLLM's own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import oasiskv

SETTINGS = {"residency": "bounded", "budget_tokens": 256}
LIMITS = ["--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "300", "--enforce-eager"]
STARTS_WITHIN, STOPS_WITHIN = 300, 60


class Server:
    """A server process on a free loopback port."""

    def __init__(self, command: list[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        for _ in range(STARTS_WITHIN * 2):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise AssertionError(f"not ready: {self.log.read_text()[-4000:]}")

    def counters(self) -> dict[str, float]:
        """OasisKV's metrics by name, without their prefix."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^vllm:oasis_(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}

    def kill(self) -> None:
        """End whatever is left of the processes that were started here."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(
    params=["oasiskv serve", pytest.param("plain vLLM", marks=pytest.mark.slow)],
)
def server(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    if request.param == "oasiskv serve":
        ours = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "oasiskv.cli.main", "serve", str(tiny_llama), *ours]
    else:
        config = json.dumps(oasiskv.engine_args(**SETTINGS)["kv_transfer_config"])
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command = [*start, "--model", str(tiny_llama), "--kv-transfer-config", config]
    running = Server([*command, *LIMITS, "--served-model-name", "tiny"], tmp_path / "server.log")
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill()


def test_a_client_streams_the_metrics_move_and_sigint_ends_it(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    before = server.counters()
    assert before["pages_fetched_total"] == 0

    text = " ".join(f"t{4 + 7 * i % 500}" for i in range(500))
    usage = {"include_usage": True}
    stream = client.completions.create(
        model="tiny",
        prompt=text,
        max_tokens=60,
        stream=True,
        stream_options=usage,
        extra_body={"ignore_eos": True},
    )
    *chunks, last = list(stream)
    assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (500, 60)
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) > 10, "it came in pieces"

    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        max_tokens=40,
        stream=True,
        stream_options=usage,
        extra_body={"ignore_eos": True, "vllm_xargs": {"oasis_budget_tokens": 128}},
    )
    *chunks, last = list(chat)
    assert last.usage is not None and last.usage.completion_tokens == 40
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 10

    after = server.counters()
    for name in ("hits", "misses", "pages_fetched", "bytes_fetched", "sparse_steps", "acknowledged_blocks"):
        assert after[f"{name}_total"] > before[f"{name}_total"], name
    assert after["host_blocks_total"] > 0
    assert after["host_blocks_used"] == 0 and after["bounded_requests"] == 0, "both requests have left"

    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(STOPS_WITHIN) == 0, server.log.read_text()[-4000:]
    assert "Traceback" not in server.log.read_text()
