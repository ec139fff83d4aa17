"""An engine to put questions to: the same context read once, then followed at several budgets, freely or by force.

A *forced* request answers the tokens it is told to, whatever the model would say (teacher forcing), and what the model
would have said is noted at each of them. Its first token comes from the dense prefill, all others from sparse steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import oasiskv
from oasiskv.core.geometry import blocks_for
from oasiskv.vllm_plugin.trace import FORCED, TRACES, Trace

BLOCK = 32
"""Tokens of a block."""
MEMORY_SHARE = 0.3
"""vLLM refuses to start without that much free memory; the pool's size is given."""
POOL_SPARE = 1.6
"""The summaries take an eighth of the pool; what was read stays in it while others answer."""


@dataclass(frozen=True)
class Ask:
    """One request. ``budget`` in tokens; None: dense. ``trace``: what it is forced to answer first."""

    prompt: Sequence[int]
    max_tokens: int
    budget: int | None = None
    trace: Trace | None = None


class EvalEngine:
    """vLLM with OasisKV, in this process. ``budget`` of a request decides whether it is sparse.

    The server's own budget is the whole context, so that a request without one stays dense: same kernels and tables as
    stock vLLM, and the same tokens (which the tests show).
    """

    def __init__(self, model: str, context: int, contexts: int, settings: dict[str, Any], dtype: str = "auto") -> None:
        """``context``: tokens of the longest request; the KV pool holds ``contexts`` of them."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        longest = blocks_for(context, BLOCK) * BLOCK
        arguments = {**settings, "residency": settings.get("residency", "bounded"), "budget_tokens": longest + BLOCK}
        self._llm: Any = LLM(
            model,
            dtype=dtype,
            max_model_len=longest,
            max_num_batched_tokens=2048,
            max_num_seqs=16,
            enforce_eager=True,
            gpu_memory_utilization=MEMORY_SHARE,
            block_size=BLOCK,
            num_gpu_blocks_override=int(POOL_SPARE * contexts * longest / BLOCK) + 1,
            logits_processors=["oasiskv.vllm_plugin.forced:ForcedAnswers"],
            **oasiskv.engine_args(**arguments),
        )
        self._asked = 0

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's."""
        return self._llm.get_tokenizer()

    def read(self, prompts: Sequence[Sequence[int]], on_done: Callable[[], None] = lambda: None) -> None:
        """Have contexts computed, one after the other, for later requests to find."""
        for prompt in prompts:
            self.answer([Ask(prompt, 1)])
            on_done()

    def answer(self, asks: Sequence[Ask], on_done: Callable[[], None] = lambda: None) -> list[list[int]]:
        """Answers of all requests, greedy, in their order. A forced part is not in them."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        numbers = {}
        for ask in asks:
            self._asked += 1
            number = self._asked
            numbers[str(number)] = ask
            own: dict[str, Any] = {} if ask.budget is None else {"oasis_budget_tokens": ask.budget}
            if ask.trace is not None:
                TRACES[number] = ask.trace
                own[FORCED] = number
            forced = len(ask.trace.tokens) if ask.trace is not None else 0
            params = SamplingParams(temperature=0.0, max_tokens=forced + ask.max_tokens, extra_args=own or None)
            engine.add_request(str(number), {"prompt_token_ids": list(ask.prompt)}, params)
        done: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
                    on_done()
        for name in done:
            TRACES.pop(int(name), None)
        return [done[name][len(ask.trace.tokens) if ask.trace is not None else 0 :] for name, ask in numbers.items()]

    def close(self) -> None:
        """Shut the engine down."""
        self._llm.llm_engine.engine_core.shutdown()
