"""What lm-eval found with two engines on the same samples, compared: pure functions on its results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist, fmean
from typing import Any

from oasiskv.eval.statistics import paired
from oasiskv.report.table import Table

LEVEL = 0.95
ABSENT = -1
"""lm-eval's RULER gives this to a sample that a metric (one length of several) does not concern."""


@dataclass(frozen=True)
class Score:
    """One metric of one task, or of a group of tasks, with one engine.

    ``values``: the metric of each sample, where ``value`` is their mean, in the order of ``prompts`` (hashes); else
    empty. ``generates``: the task lets the model write; otherwise it reads the likelihood of given answers.
    """

    value: float
    stderr: float | None
    values: tuple[float, ...] = ()
    prompts: tuple[str, ...] = ()
    generates: bool = True


Scores = dict[tuple[str, str], Score]
"""By task and metric, the metric named as in lm-eval's table: ``exact_match,strict-match``."""


@dataclass(frozen=True)
class Comparison:
    """One metric with both engines. ``low`` to ``high``: the 95 % interval of ``difference`` (ours less dense).

    ``paired``: it comes from the differences of single samples, of which ``up`` rose and ``down`` fell; otherwise from
    the two standard errors, as if the samples were different ones (wider).
    """

    task: str
    metric: str
    samples: int
    dense: float
    dense_stderr: float | None
    oasis: float
    oasis_stderr: float | None
    difference: float
    low: float | None
    high: float | None
    paired: bool
    up: int
    down: int
    generates: bool


def scores_of(results: Mapping[str, Any]) -> Scores:
    """Out of what ``lm_eval.simple_evaluate`` returns with ``log_samples``."""
    found: Scores = {}
    configs = results.get("configs", {})
    kinds = {task: config.get("output_type") == "generate_until" for task, config in configs.items()}
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        members = list(_members(task, results.get("group_subtasks", {})))
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            samples = [s for s in results.get("samples", {}).get(task, ()) if s["filter"] == filtered]
            values, prompts = _sample_values(samples, metric, float(value))
            found[task, key] = Score(
                value=float(value),
                stderr=float(error) if isinstance(error, Real) and not math.isnan(error) else None,
                values=values,
                prompts=prompts,
                generates=any(kinds.get(member, True) for member in members),
            )
    return found


def _members(task: str, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The tasks of a group, or the task itself."""
    if task not in groups:
        yield task
    for member in groups.get(task, ()):
        yield from _members(member, groups)


Means = tuple[tuple[float, ...], tuple[str, ...]]


def _sample_values(samples: Sequence[Mapping[str, Any]], metric: str, value: float) -> Means:
    """Values and prompts of the samples that ``value`` is the mean of; nothing if it is not a mean."""
    if not all(isinstance(s.get(metric), Real) for s in samples):
        return (), ()
    pairs = [(float(s[metric]), str(s["prompt_hash"])) for s in samples]
    for chosen in (pairs, [pair for pair in pairs if pair[0] != ABSENT]):
        if chosen and math.isclose(fmean(v for v, _ in chosen), value, rel_tol=1e-6, abs_tol=1e-9):
            return tuple(v for v, _ in chosen), tuple(prompt for _, prompt in chosen)
    return (), ()


def compare(dense: Scores, oasis: Scores) -> list[Comparison]:
    """Every metric that both have, in the order of ``dense``."""
    return [_compare(name, dense[name], oasis[name]) for name in dense if name in oasis]


def _compare(name: tuple[str, str], dense: Score, oasis: Score) -> Comparison:
    is_paired = len(dense.values) > 1 and dense.prompts == oasis.prompts
    changes = [b - a for a, b in zip(dense.values, oasis.values, strict=True)] if is_paired else []
    difference = oasis.value - dense.value
    low = high = None
    if is_paired:
        interval = paired(changes)
        low, high = interval.low, interval.high
    elif dense.stderr is not None and oasis.stderr is not None:
        half = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.hypot(dense.stderr, oasis.stderr)
        low, high = difference - half, difference + half
    return Comparison(
        task=name[0],
        metric=name[1].removesuffix(",none"),
        samples=len(dense.values),
        dense=dense.value,
        dense_stderr=dense.stderr,
        oasis=oasis.value,
        oasis_stderr=oasis.stderr,
        difference=difference,
        low=low,
        high=high,
        paired=is_paired,
        up=sum(change > 0 for change in changes),
        down=sum(change < 0 for change in changes),
        generates=dense.generates,
    )


def table(rows: Sequence[Comparison], title: str) -> Table:
    """For people."""
    notes = [
        "± standard error; difference: OasisKV less dense, with its 95 % interval, from the differences of single "
        "samples (up/down: how many rose and fell); where that is not possible, from the two standard errors (~)."
    ]
    if silent := sorted({row.task for row in rows if not row.generates}):
        notes.append(
            f"Say nothing about OasisKV: {', '.join(silent)}. They are scored by the likelihood of given answers, that "
            "is from the prompt alone, which is computed densely. Choose variants that generate."
        )
    columns = ("task", "metric", "samples", "dense", "OasisKV", "difference", "up/down")
    return Table(title, columns, tuple(map(_cells, rows)), "\n".join(notes))


def _cells(row: Comparison) -> tuple[str, ...]:
    interval = "" if row.low is None else f" ({row.low:+.3f} to {row.high:+.3f})"
    return (
        row.task,
        row.metric,
        str(row.samples or "-"),
        _with_error(row.dense, row.dense_stderr),
        _with_error(row.oasis, row.oasis_stderr),
        f"{row.difference:+.3f}{interval}{'' if row.paired or row.low is None else ' ~'}",
        f"{row.up}/{row.down}" if row.paired else "-",
    )


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"
