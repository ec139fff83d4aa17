"""vLLM's logits processor behind teacher forcing in :mod:`oasiskv.eval.engine`."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from oasiskv.vllm_plugin.trace import FORCED, TRACES


class ForcedAnswers(AdapterLogitsProcessor):
    """Hands every request that is forced its trace."""

    def is_argmax_invariant(self) -> bool:
        """It is all about the argmax."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The trace of a request, if it has one."""
        number = (params.extra_args or {}).get(FORCED)
        return None if number is None else TRACES[number]
