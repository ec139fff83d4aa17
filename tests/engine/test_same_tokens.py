"""Where OasisKV has nothing to leave out, or is not switched on, the tokens are those of vLLM without it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ENGINE, Engine, engine, prompt

HERE = Path(__file__).parent
PROMPTS = [prompt(n, seed=n) for n in random.Random(5).sample(range(3, 1000), 20)]
"""20 prompts of 3 to 1,000 tokens; together more than one batch holds, so that some are prefilled in chunks."""
POOL = {"num_gpu_blocks_override": 600}
"""Room for all of them at once, also without the blocks that hold summaries: the same batches with and without."""
TOKENS = 24


def parts_of(e: Engine) -> dict[str, Any]:
    """Which classes serve, and on what."""
    config = e.core.vllm_config
    runner = e.core.model_executor.driver_worker.worker.model_runner
    layers = config.compilation_config.static_forward_context.values()

    def names(objects: Any) -> list[str]:
        return sorted({f"{type(o).__module__}.{type(o).__qualname__}" for o in objects})

    return {
        "specs": names(group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups),
        "managers": names(e.scheduler.kv_cache_manager.coordinator.single_type_managers),
        "implementations": names(layer.impl for layer in layers),
        "builders": names(group.get_metadata_builder() for groups in runner.attn_groups for group in groups),
        "scheduler": names([e.scheduler]),
        "connector": names([e.scheduler.connector]),
        "block size": config.cache_config.block_size,
        "free blocks": e.pool.get_num_free_blocks(),
    }


def serve_stock(model: Path) -> dict[str, Any]:
    """Classes and tokens of an engine without OasisKV; also what the child process of these tests runs."""
    with engine(model, stock=True, vllm=POOL) as e:
        tokens = e.generate(PROMPTS, TOKENS)
    with engine(model, stock=True, vllm=POOL | {"block_size": None}) as e:  # vLLM's own choice
        return {"tokens": tokens, "parts": parts_of(e)}


@pytest.fixture(scope="module")
def without_plugin(tiny_llama: Path) -> dict[str, Any]:
    """The same from a process in which vLLM loads no plug-in."""
    code = (
        "import json, sys; from pathlib import Path; from test_same_tokens import serve_stock;"
        "print('RESULT', json.dumps(serve_stock(Path(sys.argv[1]))))"
    )
    environment = os.environ | {"VLLM_PLUGINS": "", "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama)], env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_installed_but_not_switched_on_changes_nothing(tiny_llama: Path, without_plugin: dict[str, Any]) -> None:
    installed = serve_stock(tiny_llama)
    assert installed["parts"] == without_plugin["parts"]
    assert installed["tokens"] == without_plugin["tokens"]
    assert installed["parts"]["specs"] == ["vllm.v1.kv_cache_interface.FullAttentionSpec"]
    assert installed["parts"]["managers"] == ["vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager"]


def test_the_comparison_sees_oasiskv_when_it_is_on(tiny_llama: Path, without_plugin: dict[str, Any]) -> None:
    with engine(tiny_llama, vllm=POOL) as e:
        parts = parts_of(e)
    differing = {name for name in parts if parts[name] != without_plugin["parts"][name]}
    assert differing >= {"specs", "managers", "implementations", "builders", "connector", "block size"}


@pytest.mark.parametrize("residency", ["auto", "dense", "in_place", "bounded"])
def test_a_budget_as_long_as_the_context_gives_the_same_tokens(
    tiny_llama: Path, without_plugin: dict[str, Any], residency: str
) -> None:
    with engine(tiny_llama, vllm=POOL, residency=residency, budget_tokens=ENGINE["max_model_len"]) as e:
        assert e.generate(PROMPTS, TOKENS) == without_plugin["tokens"]


def test_a_smaller_budget_gives_others(tiny_llama: Path, without_plugin: dict[str, Any]) -> None:
    """These prompts can tell: some tokens change as soon as something is left out, those of short prompts do not."""
    with engine(tiny_llama, vllm=POOL, budget_tokens=256) as e:
        tokens = e.generate(PROMPTS, TOKENS)
    for prompt_tokens, sparse, dense in zip(PROMPTS, tokens, without_plugin["tokens"], strict=True):
        if len(prompt_tokens) + TOKENS <= 256:
            assert sparse == dense
    assert sum(a != b for a, b in zip(tokens, without_plugin["tokens"], strict=True)) > 10
