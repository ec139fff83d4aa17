"""How a request is cut into sinks, hot slots, window and tail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.geometry import Geometry, blocks_for, running_at_once
from oasiskv.core.settings import Settings, SettingsError


def cut(block_size: int = 32, **settings: int) -> Geometry:
    return Geometry.of(Settings.parse(settings), block_size)


def test_the_default_budget_in_blocks_of_32() -> None:
    # 2048 / 32 = 64 blocks; 16 sink tokens round up to 1, 64 window tokens are 2: 61 are left.
    assert cut() == Geometry(block_size=32, sinks=1, hot=61, window=2)
    assert cut().bound == 64


def test_a_budget_that_is_no_multiple_of_the_block_rounds_down() -> None:
    assert cut(budget_tokens=1000).bound == 31  # 31.25: never more than the user allowed


def test_parts_are_16_tokens() -> None:
    assert cut(32).parts == 2
    assert cut(128).parts == 8


@pytest.mark.parametrize("block_size", [0, -32, 8, 24, 100])
def test_a_block_without_whole_parts_is_refused(block_size: int) -> None:
    with pytest.raises(SettingsError, match=rf"block_size={block_size} .*multiple of 16.*--block-size 32"):
        cut(block_size)


def test_a_budget_without_a_hot_slot_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(SettingsError, match=r"budget_tokens=300 .*allowed is 384 or more"):
        cut(128, budget_tokens=300)  # 1 sink + 1 window + 1 hot block of 128
    assert cut(128, budget_tokens=384).hot == 1


def test_one_request_can_have_a_budget_of_its_own() -> None:
    assert Geometry.of(Settings(), 32, budget_tokens=512).bound == 16


def test_the_window_is_the_newest_full_blocks_and_the_tail_is_beyond_it() -> None:
    g = cut()
    assert g.first_window(1000) == 29  # 31 full blocks, the last two are the window; 8 tokens are the tail
    assert g.middle(1000) == 28
    assert g.first_window(1023) == 29
    assert g.first_window(1024) == 30


def test_a_short_context_has_no_middle() -> None:
    g = cut()
    assert [g.middle(n) for n in (0, 1, 32, 96, 127)] == [0] * 5
    assert g.middle(128) == 1


def test_footprint_is_the_budget_with_tail_and_lookahead() -> None:
    g = cut()
    assert g.footprint() == 65
    assert g.footprint(lookahead_tokens=1) == 66
    assert g.footprint(lookahead_tokens=32) == 66
    assert g.footprint(lookahead_tokens=33) == 67


def test_requests_that_run_at_once_while_each_is_prefilled_in_full() -> None:
    # Pool 500, prompt 188 blocks, bounded 65: (500 - 188) // 65 + 1.
    assert running_at_once(500, 188, 65) == 5
    assert running_at_once(188, 188, 65) == 1
    assert running_at_once(187, 188, 65) == 0


@given(
    block_size=st.sampled_from([16, 32, 64, 128]),
    budget=st.integers(600, 8192),
    sinks=st.integers(1, 128),
    window=st.integers(1, 128),
    committed=st.integers(0, 100_000),
)
def test_the_cut_covers_every_full_block_once_and_stays_within_the_budget(
    block_size: int, budget: int, sinks: int, window: int, committed: int
) -> None:
    g = cut(block_size, budget_tokens=budget, sink_tokens=sinks, window_tokens=window)
    full = committed // block_size
    assert g.bound * block_size <= budget
    assert g.sinks * block_size >= sinks
    assert g.window * block_size >= window
    assert g.middle(committed) >= 0
    if g.middle(committed):
        assert g.sinks + g.middle(committed) + g.window == full


@given(tokens=st.integers(0, 10_000), block_size=st.integers(1, 256))
def test_blocks_for_holds_the_tokens_and_not_a_block_more(tokens: int, block_size: int) -> None:
    blocks = blocks_for(tokens, block_size)
    assert blocks * block_size >= tokens > (blocks - 1) * block_size or tokens == blocks == 0
