"""What the model would have said along an answer that it is forced to give (teacher forcing). No vLLM in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FORCED = "oasis_eval_forced"
"""Key of ``SamplingParams.extra_args`` with the number of a :class:`Trace`."""


@dataclass
class Trace:
    """What the model would have said along ``tokens``; after them the answer goes on freely.

    ``nll``: nats of each token. With ``keeps`` the log-probabilities ``[tokens, vocabulary]`` are kept in ``logprobs``;
    with ``beside`` (another's) ``kl`` and ``same_top`` compare with them: nats, and whether the best token is the same.
    """

    tokens: Sequence[int]
    keeps: bool = False
    beside: list[Tensor] | None = None
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        """vLLM's interface of a request's own logits processor."""
        place = len(output_ids)
        if place >= len(self.tokens):
            return logits
        if place == len(self.nll):  # not again where a preempted request replays its output
            self._note(logits.float().log_softmax(-1), place)
        forced = torch.full_like(logits, float("-inf"))
        forced[self.tokens[place]] = 0.0
        return forced

    def _note(self, logprobs: Tensor, place: int) -> None:
        self.nll.append(-float(logprobs[self.tokens[place]]))
        if self.keeps:
            self.logprobs.append(logprobs.clone())
        if self.beside is not None:
            other = self.beside[place]
            possible = other > float("-inf")
            self.kl.append(float((other.exp() * (other - logprobs))[possible].sum()))
            self.same_top.append(int(logprobs.argmax()) == int(other.argmax()))


TRACES: dict[int, Trace] = {}
"""Traces of the requests under way, for engines that run in this process."""
