"""Two ranks, each with its own KV heads, sets of blocks and host arena: every row of both is exact."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import ENGINE, OASIS, prompt
from verifier import Report

import oasiskv

HERE = Path(__file__).parent


@pytest.mark.parametrize("residency", [pytest.param("in_place", marks=pytest.mark.slow), "bounded"])
def test_rows_of_both_ranks_are_exact(
    tiny_llama: Path, tiny_draft: Path, verified: Any, monkeypatch: pytest.MonkeyPatch, residency: str
) -> None:
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), str(HERE.parent))))
    arguments = {
        "model": str(tiny_llama),
        "tensor_parallel_size": 2,
        "worker_extension_cls": "verifier.VerifierExtension",
        "speculative_config": {"method": "draft_model", "model": str(tiny_draft), "num_speculative_tokens": 3},
    }
    llm = LLM(**ENGINE, **arguments, **oasiskv.engine_args(**OASIS | {"residency": residency}))
    try:
        llm.collective_rpc("verifier_start")
        sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt(600 + 37 * i, seed=i)} for i in range(4)]
        llm.generate(prompts, sampling, use_tqdm=False)
        reports = [Report(**fields) for fields in llm.collective_rpc("verifier_report")]
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert len(reports) == 2
    for rank, report in enumerate(reports):
        verified(f"rank {rank}: {report}")
        assert report.rows[residency] >= 1000
        assert max(report.worst.values()) < 1e-5, str(report)
