"""One row of the demo: its figures, and how many questions it answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oasiskv.bench.figures import Figures, figures
from oasiskv.bench.job import Run
from oasiskv.demo.documents import Prompt, is_right


@dataclass(frozen=True)
class Outcome:
    """``pool_blocks``: device blocks free before the first request came."""

    row: str
    figures: Figures
    block_size: int
    pool_blocks: int
    right: int
    answers: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, prompts: Sequence[Prompt]) -> Outcome:
        """From what the engine did; answers in the order of the prompts."""
        texts = {answer.name: answer.text for answer in run.answers}
        return cls(
            row=run.row,
            figures=figures(run),
            block_size=run.block_size,
            pool_blocks=run.pool_blocks,
            right=sum(is_right(texts[p.city], p.number) for p in prompts),
            answers=tuple(texts[p.city] for p in prompts),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {name: getattr(self, name) for name in ("row", "block_size", "pool_blocks", "right", "answers")}
        return own | self.figures.as_dict()
