"""How sure is a difference? Paired differences with confidence intervals, by bootstrap over what is independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 4000
AT_ONCE = 1_000_000
"""Units drawn together: what this keeps in memory."""
LEAST_GROUPS = 3
"""Fewer groups say nothing about how groups differ."""
BLOCK_TOKENS = 32
"""Neighbouring tokens of a text are alike; so many in a row count as one observation."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    """NaN, as ``high``, where one observation alone says nothing about the spread."""
    high: float

    def text(self, digits: int) -> str:
        """``+0.12 (+0.08 to +0.16)``; the mean alone where no interval is known."""
        mean, low, high = (f"{value:+.{digits}f}" for value in (self.mean, self.low, self.high))
        return mean if math.isnan(self.low) else f"{mean} ({low} to {high})"

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which knows no NaN."""
        return {name: None if math.isnan(value) else value for name, value in vars(self).items()}


def paired(
    differences: ArrayLike, groups: ArrayLike | None = None, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """The mean of paired differences and how sure it is; the same arguments give the same interval.

    Units are drawn with replacement: whole groups (a document with its questions, a block of tokens) if groups are
    given and there are three or more of them, else single items (of two documents: as if their questions were
    independent, which is too narrow). The percentiles of the drawn means are then moved away from the mean, by
    ``sqrt(n / (n - 1))`` and by Student's t over the normal quantile, since those of ``n`` units alone are too narrow
    (Hesterberg, What Teachers Should Know about the Bootstrap, 2015).

    Args:
        differences: ``[n]``, one per item: this arm less the other on the same item.
        groups: ``[n]``, the label of the group that the item belongs to.
        confidence: probability that the interval holds the true mean.
        seed: of the draws.

    Raises:
        ValueError: nothing to average, or not one label per difference.
    """
    values = np.asarray(differences, dtype=np.float64)
    labels = np.arange(len(values)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if not len(values) or labels.shape != values.shape:
        raise ValueError(f"{values.shape} differences and {labels.shape} groups: as many of both, and at least one")
    if labels.max() + 1 < LEAST_GROUPS:
        labels = np.arange(len(values))
    sums, counts = np.bincount(labels, weights=values), np.bincount(labels)
    units, mean = len(sums), float(values.mean())
    if units == 1:
        return Interval(mean, math.nan, math.nan)
    source = np.random.default_rng(seed)
    means: list[float] = []
    while len(means) < RESAMPLES:
        drawn = source.integers(units, size=(max(1, min(RESAMPLES, AT_ONCE // units)), units))
        means += (sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)).tolist()
    low, high = np.quantile(means[:RESAMPLES], [(1 - confidence) / 2, (1 + confidence) / 2])
    wider = math.sqrt(units / (units - 1)) * student_t(confidence, units - 1)
    wider /= NormalDist().inv_cdf((1 + confidence) / 2)
    return Interval(mean, mean + wider * (float(low) - mean), mean + wider * (float(high) - mean))


def token_blocks(lengths: Sequence[int], size: int = BLOCK_TOKENS) -> NDArray[np.int64]:
    """Groups for :func:`paired` where the items are the tokens of texts: blocks of ``size`` in a row.

    Args:
        lengths: tokens of each text, in the order of the items; a block never spans two texts.
        size: tokens in a block; the last of a text may have fewer.

    Returns:
        ``[sum(lengths)]``: the number of each token's block.
    """
    labels: list[int] = []
    for length in lengths:
        first = labels[-1] + 1 if labels else 0
        labels += [first + token // size for token in range(length)]
    return np.array(labels, dtype=np.int64)


@lru_cache
def student_t(confidence: float, freedom: int) -> float:
    """The ``t`` with ``P(|T| < t) = confidence`` for Student's T with ``freedom`` degrees of freedom.

    With ``T = sqrt(freedom) tan(a)`` the density of ``a`` is proportional to ``cos(a) ** (freedom - 1)``, whose sum is
    looked up.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    middles = (angles[1:] + angles[:-1]) / 2
    inside = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (freedom - 1))])
    return math.sqrt(freedom) * math.tan(float(np.interp(confidence, inside / inside[-1], angles)))
