"""A policy of a study: which scorer chooses, within which budget, from whose queries, how often."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oasiskv.core.geometry import Geometry
from oasiskv.core.link_budget import pages_per_step
from oasiskv.core.scorers import SCORERS
from oasiskv.core.settings import Settings, SettingsError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
ONLY_MEASURED = ("oracle", "random")
"""Scorers that no engine can have."""


@dataclass(frozen=True)
class Policy:
    """``scorer`` may be one that is only measured; all else is as in ``settings``. ``dtype``: of the summaries."""

    scorer: str
    dtype: torch.dtype = torch.bfloat16
    settings: Settings = field(default_factory=Settings)

    @property
    def interval(self) -> int:
        """Steps from one scoring of a layer to its next, as the engine would have it."""
        known = self.scorer if self.scorer not in ONLY_MEASURED else "box"
        return self.settings.model_copy(update={"scorer": known}).steps_between_scores

    def geometry(self, block_size: int) -> Geometry:
        """The cut of a context."""
        return Geometry.of(self.settings, block_size)

    def cap(self, block_size: int) -> int:
        """Most pages per KV head and step.

        Raises:
            SettingsError: ``fetch_cap`` is to be measured.
        """
        if self.settings.fetch_cap == "auto":
            raise SettingsError("OasisKV: fetch_cap='auto' needs a measured link, which a study has not; give a share")
        return pages_per_step(self.settings.fetch_cap, self.geometry(block_size))


def label(policy: Policy, beside: Sequence[Policy]) -> str:
    """The scorer (``box:int8`` where its summaries are not in bfloat16), and what sets the policy apart from others."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype is policy.dtype)
    parts = [policy.scorer if dtype == "bfloat16" else f"{policy.scorer}:{dtype}"]
    names = {"budget_tokens": "", "fetch_cap": "cap ", "predictor": "", "granularity": "per ", "group_merge": ""}
    for name, word in names.items():
        if len({getattr(other.settings, name) for other in beside}) > 1:
            parts.append(f"{word}{getattr(policy.settings, name)}")
    return " ".join(parts)


def parse_scorer(text: str) -> tuple[str, torch.dtype]:
    """``box`` or ``box:int8``.

    Raises:
        ValueError: there is no such scorer or number format.
    """
    name, _, dtype = text.partition(":")
    if name not in SCORERS or (dtype or "bfloat16") not in DTYPES:
        raise ValueError(
            f"{text!r} is not allowed: a scorer ({', '.join(SCORERS)}), perhaps with :{' or :'.join(DTYPES)}"
        )
    return name, DTYPES[dtype or "bfloat16"]


def policies(
    scorers: Sequence[tuple[str, torch.dtype]], fixed: Mapping[str, Any], **choices: Sequence[Any]
) -> list[Policy]:
    """Every combination: ``choices`` are settings, each with the values to compare; ``fixed`` are the same for all.

    Raises:
        SettingsError: a combination is not allowed.
    """
    combined = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    return [Policy(name, dtype, Settings.parse({**fixed, **own})) for own in combined for name, dtype in scorers]
