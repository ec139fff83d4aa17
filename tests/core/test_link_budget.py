"""Pages per step: from a share of the budget, or from what the link carries."""

import pytest

from oasiskv.core.geometry import Geometry
from oasiskv.core.link_budget import pages_per_step

GEOMETRY = Geometry(block_size=32, sinks=1, hot=61, window=2)  # a budget of 2,048 tokens: 64 blocks


@pytest.mark.parametrize(("cap", "pages"), [(0.05, 3), (0.02, 1), (0.001, 1), (0.5, 32), (0.99, 61), (1.0, 61)])
def test_a_share_is_of_the_whole_budget_and_at_least_one_page(cap, pages):
    assert pages_per_step(cap, GEOMETRY) == pages


def test_auto_is_what_the_link_carries_in_a_step():
    """10 GB/s for 2 ms is 20 MB: over 8 requests x 30 layers x 3 heads, 27.8 kB each; 3 pages of 8 KiB."""
    pages = pages_per_step("auto", GEOMETRY, copy_bandwidth=1e10, step_seconds=2e-3, page_bytes=8192, streams=720)
    assert pages == 3


@pytest.mark.parametrize(("bandwidth", "pages"), [(1.0, 1), (1e15, 6)])
def test_auto_stays_between_one_page_and_a_tenth_of_the_budget(bandwidth, pages):
    measured = {"step_seconds": 2e-3, "page_bytes": 8192, "streams": 720}
    assert pages_per_step("auto", GEOMETRY, copy_bandwidth=bandwidth, **measured) == pages


def test_never_more_than_the_hot_slots():
    assert pages_per_step(0.9, Geometry(block_size=32, sinks=1, hot=1, window=2)) == 1


def test_auto_without_measurements_is_refused():
    with pytest.raises(ValueError, match="step_seconds"):
        pages_per_step("auto", GEOMETRY, copy_bandwidth=1e10, page_bytes=8192, streams=720)
    with pytest.raises(ValueError, match="fetch_cap=0"):
        pages_per_step(0.0, GEOMETRY)
