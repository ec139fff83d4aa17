"""The link budget: how many pages per KV head may be brought in per step."""

from __future__ import annotations

from typing import Literal

from oasiskv.core.geometry import Geometry

LARGEST_AUTO_SHARE = 0.1
"""More than this share of the budget per step brings nothing measurable (predictor study, section 4)."""


def pages_per_step(
    cap: float | Literal["auto"],
    geometry: Geometry,
    *,
    copy_bandwidth: float | None = None,
    step_seconds: float | None = None,
    page_bytes: int | None = None,
    streams: int | None = None,
) -> int:
    """Most pages per KV head, layer and step: at least one, at most all hot slots.

    A number is a share of the budget (sinks, hot slots and window together); 1 or more switches the cap off. ``auto``
    is what the link carries while a step lasts, shared out evenly: the paper's link budget ``C_token = bandwidth x
    step time``, divided by the bytes of one page in each stream, and clamped to [one page, 0.1 of the budget].

    Args:
        cap: the setting ``fetch_cap``.
        geometry: the cut of the request (its budget in blocks).
        copy_bandwidth: measured bytes per second from the tier to the device (``auto`` only, as all below).
        step_seconds: measured duration of a step.
        page_bytes: K and V bytes of one block in one layer for one KV head (or for all, with one set per layer).
        streams: sets of hot slots that share the link: requests x layers x KV heads (1 with one set per layer).

    Raises:
        ValueError: ``cap`` is not positive, or it is ``auto`` and a measurement is missing or not positive.
    """
    if cap != "auto":
        if cap <= 0:
            raise ValueError(f"fetch_cap={cap} is not allowed: it must be above 0, or 'auto'")
        return geometry.hot if cap >= 1 else _clamp(round(cap * geometry.bound), geometry.hot)
    measured = {
        "copy_bandwidth": copy_bandwidth,
        "step_seconds": step_seconds,
        "page_bytes": page_bytes,
        "streams": streams,
    }
    for name, value in measured.items():
        if value is None or value <= 0:
            raise ValueError(f"fetch_cap='auto' needs {name} above 0, not {value}")
    assert copy_bandwidth and step_seconds and page_bytes and streams
    carried = copy_bandwidth * step_seconds / (page_bytes * streams)
    return _clamp(int(min(carried, LARGEST_AUTO_SHARE * geometry.bound)), geometry.hot)


def _clamp(pages: int, hot: int) -> int:
    return max(1, min(pages, hot))
