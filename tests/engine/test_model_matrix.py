"""Every decoder with full-attention layers: one tiny model of each family that differs in its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ENGINE, Engine, engine, prompt
from tiny import make_tiny_model

PROMPTS = [prompt(n, seed) for seed, n in enumerate(range(600, 800, 37))]


def is_under_us(e: Engine) -> dict[str, bool]:
    """Which attention layers are OasisKV's: by the class of their KV cache spec."""
    return {
        name: type(group.kv_cache_spec).__name__ == "OasisSpec"
        for group in e.core.model_executor.driver_worker.worker.model_runner.kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }


@pytest.mark.parametrize("residency", ["in_place", "bounded"])
@pytest.mark.parametrize(
    "kind", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3", pytest.param("mistral", marks=pytest.mark.slow)]
)
def test_rows_are_exact(tmp_path: Path, verified: Any, kind: str, residency: str) -> None:
    model = make_tiny_model(tmp_path / kind, kind)
    with engine(model, residency=residency) as e:
        assert set(is_under_us(e).values()) == {True} and len(is_under_us(e)) == 3
        report = e.verify()
        e.generate(PROMPTS, max_tokens=60)
        verified(report)
        assert report.rows[residency] >= 1000 and max(report.worst.values()) < 1e-5, str(report)


@pytest.mark.parametrize("residency", ["in_place", "bounded"])
def test_sliding_layers_of_a_mixed_model_pass_through(tmp_path: Path, verified: Any, residency: str) -> None:
    """Only the full-attention layers are ours; the sliding ones keep vLLM's spec, manager and kernel."""
    model = make_tiny_model(tmp_path / "gemma3", "gemma3")
    with engine(model, residency=residency) as e:
        ours = is_under_us(e)
        assert {name for name, own in ours.items() if own} == {
            f"model.layers.{i}.self_attn.attn" for i in (1, 3)
        } and len(ours) == 4
        report = e.verify()
        sparse = e.generate(PROMPTS, max_tokens=90)
        verified(report)
        assert report.rows[residency] >= 1000 and max(report.worst.values()) < 1e-5, str(report)
    with engine(model, stock=True) as e:
        dense = e.generate(PROMPTS, max_tokens=90)
    with engine(model, residency=residency, budget_tokens=ENGINE["max_model_len"]) as e:
        assert e.generate(PROMPTS, max_tokens=90) == dense != sparse
