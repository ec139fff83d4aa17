"""The engine that questions are put to: what is forced is answered, and what the model would have said is noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oasiskv.eval.engine import Ask, EvalEngine
from oasiskv.vllm_plugin.trace import Trace

PROMPT = torch.randint(4, 400, (500,), generator=torch.Generator().manual_seed(0)).tolist()
TAIL = torch.randint(4, 400, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Any:
    found = EvalEngine(str(tiny_llama), 600, 4, {"scorer": "box", "pipeline": "inline"}, dtype="float32")
    yield found
    found.close()


def reference(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT + TAIL])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


def test_a_dense_trace_is_the_models_own_likelihood(engine: Any, tiny_llama: Path) -> None:
    trace = Trace(TAIL, keeps=True)
    engine.answer([Ask(PROMPT, 1, None, trace)])
    expected = reference(tiny_llama)
    nll = -expected[torch.arange(len(TAIL)), TAIL]
    assert np.allclose(trace.nll, nll.tolist(), atol=2e-3)
    assert torch.allclose(torch.stack(trace.logprobs), expected, atol=2e-3)


def test_a_free_answer_follows_the_forced_part(engine: Any) -> None:
    forced, plain = engine.answer([Ask(PROMPT, 12, None, Trace(TAIL)), Ask(PROMPT + TAIL, 12)])
    assert forced == plain
    assert len(forced) == 12


def test_budgets_are_compared_with_dense_token_by_token(engine: Any) -> None:
    dense = Trace(TAIL, keeps=True)
    engine.answer([Ask(PROMPT, 1, None, dense)])
    small, whole = (Trace(TAIL, beside=dense.logprobs) for _ in range(2))
    engine.answer([Ask(PROMPT, 1, 192, small), Ask(PROMPT, 1, 600, whole)])
    assert len(small.kl) == len(small.same_top) == len(TAIL)
    assert max(whole.kl) < 1e-6 and all(whole.same_top)  # a budget as long as the context changes nothing
    assert small.kl[0] < 1e-6  # its first token comes from the dense prefill
    assert max(small.kl[1:]) > 1e-4
