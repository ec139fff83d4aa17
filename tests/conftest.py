"""Fixtures that more than one test module uses, and what the tests print at their end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `from tiny import make_tiny_llama`, from any folder of tests

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # OpenMP's threads spin while they wait: on a busy machine two take 20 times as long as one
    "NUMBA_NUM_THREADS": "1",  # the n-gram proposer's threads set OpenMP's
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",  # by default it takes hundreds of MiB before it forgets a shape
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB at most; every test names its pool in blocks
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the test's own process, so that its state can be looked at
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
for _name, _value in ENVIRONMENT.items():  # before torch and vLLM are imported
    os.environ.setdefault(_name, _value)

VERIFIED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the lines of :func:`verified`."""
    config.stash[VERIFIED] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the worst errors that were found, whether or not output is captured."""
    if config.stash[VERIFIED]:
        terminalreporter.section("attention rows verified against the masked reference")
        for line in config.stash[VERIFIED]:
            terminalreporter.write_line(line)


@pytest.fixture
def verified(request: pytest.FixtureRequest):
    """``verified(report)`` puts a report's rows and worst errors into the summary at the end of the run."""

    def note(report: object) -> None:
        line = f"{request.node.nodeid.split('::', 1)[1]}: {report}"
        request.config.stash[VERIFIED].append(line)
        print(line)

    return note


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama in float32 (3 layers, 4 query and 2 KV heads, context 4,096)."""
    from tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of another tiny Llama, of one layer: a drafter whose drafts are mostly wrong."""
    from tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-draft", seed=3, num_hidden_layers=1)


@pytest.fixture(scope="session")
def steady_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama that soon repeats itself, and that agrees with itself whatever blocks it attends to."""
    from tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "steady-llama", mixing=0.007)
