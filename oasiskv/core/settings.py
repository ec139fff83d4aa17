"""The settings of OasisKV: one frozen, checked object with the same names everywhere.

The command line (``--budget-tokens``), ``kv_connector_extra_config`` (``{"budget_tokens": 2048}``) and
``oasiskv.engine_args(budget_tokens=2048)`` all build a :class:`Settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Auto = Literal["auto"]
Residency = Literal["auto", "dense", "in_place", "bounded"]
PART_TOKENS = 16
"""Tokens that share one summary; a block has ``block_size / 16`` parts."""
LEAST_REFINED_TOKENS = 4096
"""Tokens whose codes ``refine=auto`` reads at least: small budgets lose the pages that outlines rank badly."""


class SettingsError(ValueError):
    """A setting is wrong. The message names the value, what is allowed and the fix."""


class Settings(BaseModel):
    """What a user can choose. Values are checked once, when vLLM's configuration is built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    residency: Annotated[
        Residency,
        Field(description="Where a decoding request's KV lives: its last state, or `auto` to move as memory needs."),
    ] = "auto"
    budget_tokens: Annotated[
        int, Field(gt=0, description="Tokens of KV that a bounded request keeps: sinks, hot slots and window together.")
    ] = 2048
    sink_tokens: Annotated[
        int, Field(gt=0, description="First tokens that always stay (rounded up to whole blocks).")
    ] = 16
    window_tokens: Annotated[
        int, Field(gt=0, description="Newest tokens that always stay, besides the tail block (rounded up to blocks).")
    ] = 64
    fetch_cap: Annotated[
        Auto | Annotated[float, Field(gt=0, le=1)],
        Field(
            description="Share of the budget replaced per step, layer and KV head, at least one page; 1 switches the "
            "cap off; `auto` derives it from the measured copy bandwidth and step time."
        ),
    ] = 0.05
    scorer: Annotated[
        Literal["box", "minmax", "mean", "q2"], Field(description="How a block's relevance is estimated.")
    ] = "q2"
    refine: Annotated[
        Literal["auto", "all"] | Annotated[float, Field(ge=1)],
        Field(
            description="With `q2` and `group_merge=softmax_sum`: pages whose codes are read, best outlines first, as "
            "a multiple of the hot slots; `auto`: twice the hot slots, at least 4,096 tokens."
        ),
    ] = "auto"
    score_interval: Annotated[
        Auto | Annotated[int, Field(ge=1)],
        Field(description="Steps from one scoring of a layer to its next; `auto`: 4 for `q2`, else 1."),
    ] = "auto"
    summary_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        Field(description="Number format of the summaries; `auto` is the model's own (bfloat16 or float32)."),
    ] = "auto"
    group_merge: Annotated[
        Literal["softmax_sum", "softmax_max", "mean", "max"],
        Field(description="How the query heads that share a KV head are merged into one score per block."),
    ] = "softmax_sum"
    granularity: Annotated[
        Literal["head", "layer"], Field(description="One set of blocks for each KV head, or one for each layer.")
    ] = "head"
    predictor: Annotated[
        Literal["both", "lookahead", "current"],
        Field(description="Whose queries predict the next step's blocks: last draft row, current row, or their sum."),
    ] = "both"
    miss_policy: Annotated[
        Literal["drop", "fetch"],
        Field(description="A wanted block that is not resident is left out of this step, or fetched before attention."),
    ] = "drop"
    pipeline: Annotated[
        Literal["auto", "async", "inline"],
        Field(description="Score and plan on a background thread, or in the layer itself; `auto`: by the free cores."),
    ] = "auto"
    host_gib: Annotated[
        Auto | Annotated[float, Field(ge=0)],
        Field(
            description="Host pool of one engine in GiB, shared out to its ranks; `auto`: four times the device pool, "
            "at most a quarter of the machine's (or container's) memory. On a CPU the summaries of the device pool "
            "are part of it."
        ),
    ] = "auto"
    reuse_approximate: Annotated[
        bool,
        Field(description="Whether blocks that sparse steps computed may be reused, by requests that will be bounded."),
    ] = True
    min_context_tokens: Annotated[
        Auto | Annotated[int, Field(ge=0)],
        Field(description="A request with a shorter context stays dense; `auto`: the request's budget."),
    ] = "auto"

    @model_validator(mode="after")
    def _budget_holds_the_fixed_part(self) -> Settings:
        fixed = self.sink_tokens + self.window_tokens
        if self.budget_tokens <= fixed:
            raise ValueError(
                f"budget_tokens={self.budget_tokens} leaves no room for hot slots: sink_tokens={self.sink_tokens} and "
                f"window_tokens={self.window_tokens} already take {fixed}; allowed is more than {fixed}; "
                "raise budget_tokens or lower the other two"
            )
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        """Check ``values`` and build the object.

        Raises:
            SettingsError: one line per wrong setting: its value, what is allowed, and the fix.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise SettingsError("OasisKV: " + "; ".join(_explain(e) for e in error.errors())) from None

    @property
    def steps_between_scores(self) -> int:
        """``score_interval`` with ``auto`` resolved: what costs more is done less often."""
        if self.score_interval != "auto":
            return self.score_interval
        return 4 if self.scorer == "q2" else 1

    def refined_pages(self, hot: int, block_size: int) -> int | None:
        """``refine`` in pages of ``block_size`` tokens, for ``hot`` slots; None: all."""
        if self.refine == "all":
            return None
        if self.refine == "auto":
            return max(2 * hot, LEAST_REFINED_TOKENS // block_size)
        return max(hot, round(self.refine * hot))

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as ``kv_connector_extra_config`` takes them."""
        return self.model_dump(exclude_defaults=True)


def _explain(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"] if part in Settings.model_fields) or ".".join(
        str(part) for part in error["loc"][:1]
    )
    if error["type"] == "extra_forbidden":
        close = get_close_matches(name, Settings.model_fields, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known settings: {', '.join(Settings.model_fields)}"
        return f"unknown setting {name}={error['input']!r}; {hint}"
    if error["type"] == "value_error" and not error["loc"]:
        return str(error["ctx"]["error"])
    return f"{name}={error['input']!r} is not allowed: {error['msg']}"
