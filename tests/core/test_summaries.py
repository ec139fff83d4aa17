"""Summaries against brute force: whatever is written, drafted, refused, shared and released, each committed block
has the summary of the keys that lie in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.core.scorers import make_scorer
from oasiskv.core.settings import PART_TOKENS
from oasiskv.core.summaries import LayerSummaries, SummaryBook, Written
from oasiskv.core.summary_store import SummaryStore

HEADS, DIM, BLOCKS, LOOKAHEAD = 2, 4, 64, 5


@dataclass
class Request:
    """``blocks``: device block of each logical block. Of the ``written`` tokens the last ``drafted`` are drafts, of
    which ``accepted`` will turn out right."""

    blocks: list[int] = field(default_factory=list)
    written: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def committed(self) -> int:
        return self.written - self.drafted + self.accepted

    @property
    def certain(self) -> int:
        """Tokens that the last step knew to be kept."""
        return self.written - self.drafted


class World:
    """A book, one layer's store, and beside them every key that was written to every slot."""

    def __init__(self, block_size: int, scorer: str = "box", key_dtype: torch.dtype = torch.float32) -> None:
        self.size = block_size
        self.scorer = make_scorer(scorer, DIM, torch.float32)
        size = self.scorer.page_bytes(block_size // PART_TOKENS)
        store = SummaryStore.zeros(HEADS, BLOCKS, size, self.scorer.outline_bytes)
        self.book = SummaryBook(BLOCKS, block_size, LOOKAHEAD)
        self.layer = LayerSummaries(self.scorer, store, block_size, key_dtype)
        self.truth = torch.zeros((BLOCKS, block_size, HEADS, DIM))
        self.free = list(range(BLOCKS))
        self.shared: dict[int, int] = {}  # users of each block
        self.generator = torch.Generator().manual_seed(0)

    def arrive(self, prefix: Request | None = None, full_blocks: int = 0) -> Request:
        """A new request; with ``prefix``, it finds that many full blocks of another one in the cache."""
        request = Request()
        if prefix is not None:
            request.blocks = prefix.blocks[:full_blocks]
            request.written = full_blocks * self.size
            for block in request.blocks:
                self.shared[block] += 1
        return request

    def step(self, writes: list[tuple[Request, int, int, int]]) -> None:
        """Each request writes ``count`` tokens, of which the last ``drafted`` are drafts and ``accepted`` get kept."""
        planned, keys, first = [], [], 0
        for request, count, drafted, accepted in writes:
            start = request.committed
            while len(request.blocks) * self.size < start + count:
                request.blocks.append(self.free.pop(0))
                self.shared[request.blocks[-1]] = 1
            planned.append(Written(start, count, drafted, first, list(request.blocks)))
            new = torch.randn((count, HEADS, DIM), generator=self.generator)
            for i in range(count):
                position = start + i
                self.truth[request.blocks[position // self.size], position % self.size] = new[i]
            keys.append(new)
            first += count
            request.written, request.drafted, request.accepted = start + count, drafted, accepted
        self.layer.apply(self.book.write(planned), torch.cat(keys) if keys else torch.zeros(0, HEADS, DIM))
        self.book.check_integrity()
        for request, *_ in writes:
            self.check(request, request.certain)

    def leave(self, request: Request) -> None:
        """The request ends; its last blocks are finished, and its blocks are free once nobody else has them."""
        first = max(0, request.committed // self.size - 1 - -(-LOOKAHEAD // self.size))
        tails = [
            (request.blocks[i], min(max(request.committed - i * self.size, 0), self.size))
            for i in range(first, len(request.blocks))
        ]
        self.layer.apply(self.book.finish(tails), None)
        self.book.check_integrity()
        self.check(request, request.committed)
        for block in request.blocks:
            self.shared[block] -= 1
            if not self.shared[block]:
                self.free.append(block)

    def check(self, request: Request, tokens: int) -> None:
        """Every block within the first ``tokens`` tokens is summarised, and rightly so."""
        whole = torch.tensor(request.blocks[: tokens // self.size], dtype=torch.int64)
        expected = self.scorer.summarise(self.truth[whole]).transpose(0, 1)
        assert torch.equal(self.layer.store.get(whole), expected), f"not those of their keys ({tokens} are certain)"
        assert self.book.done[whole.numpy()].all()


# --- by hand


@pytest.mark.parametrize("chunks", [[128], [1] * 64, [5, 59], [33, 31], [16] * 4, [40, 1, 1, 1, 1, 20], [100, 28]])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_any_cut_of_a_prompt_gives_the_same_summaries(block_size: int, chunks: list[int]) -> None:
    world = World(block_size)
    request = world.arrive()
    for count in chunks:
        world.step([(request, count, 0, 0)])
    world.leave(request)
    assert world.book.staged_blocks == 0


def test_a_block_waits_for_its_drafts() -> None:
    """31 tokens and 3 drafts fill a block, but its last token may be refused: it is summarised a step later."""
    world = World(32)
    request = world.arrive()
    world.step([(request, 34, 3, 3)])
    assert not world.book.done[request.blocks[0]]
    world.step([(request, 1, 0, 0)])
    assert world.book.done[request.blocks[0]]


def test_a_refused_draft_leaves_no_trace() -> None:
    world = World(16)
    request = world.arrive()
    world.step([(request, 13, 0, 0)])
    world.step([(request, 4, 3, 0)])  # position 13, and drafts at 14, 15, 16 that are all refused
    world.step([(request, 4, 3, 1)])  # 14 again, with another key
    world.step([(request, 4, 3, 0)])
    world.step([(request, 1, 0, 0)])
    assert world.book.done[request.blocks[0]]


def test_a_draft_that_ends_a_block_is_summarised_when_the_next_step_starts_behind_it() -> None:
    world = World(16)
    request = world.arrive()
    world.step([(request, 14, 0, 0)])
    world.step([(request, 6, 5, 5)])
    world.step([(request, 1, 0, 0)])
    assert world.book.done[request.blocks[0]]


def test_a_block_that_is_used_again_starts_anew() -> None:
    world = World(32)
    first = world.arrive()
    world.step([(first, 32 * BLOCKS, 0, 0)])
    world.leave(first)
    second = world.arrive()
    world.step([(second, 20, 0, 0)])
    assert not world.book.done[second.blocks[0]]
    world.step([(second, 12, 0, 0)])
    assert world.book.done[second.blocks[0]]


def test_the_last_token_of_a_summarised_block_may_be_written_again() -> None:
    """A prompt that is all in the cache is computed anew from its last token on."""
    world = World(32)
    first = world.arrive()
    world.step([(first, 64, 0, 0)])
    second = world.arrive(first, full_blocks=2)
    writes = world.book.write([Written(63, 1, 0, 0, second.blocks)])
    world.layer.apply(writes, world.truth[second.blocks[1], 31:])
    world.book.check_integrity()
    world.check(second, 64)
    assert world.book.staged_blocks == 0


def test_a_hit_in_the_very_step_that_completes_the_block() -> None:
    """The one that finds the block comes first in the batch."""
    world = World(32)
    first = world.arrive()
    world.step([(first, 20, 0, 0)])
    second = world.arrive(first, full_blocks=1)
    world.step([(second, 40, 0, 0), (first, 12, 0, 0)])
    world.check(second, 72)
    assert world.book.done[second.blocks[0]]


def test_a_stage_row_is_not_given_away_before_it_is_read() -> None:
    """One request completes its block in the step in which another one needs a row."""
    world = World(32)
    first, second = world.arrive(), world.arrive()
    world.step([(first, 31, 0, 0)])
    world.step([(first, 1, 0, 0), (second, 9, 0, 0)])
    world.check(first, 32)


def test_rows_are_as_many_as_unfinished_blocks_at_once_not_as_requests() -> None:
    world = World(32)
    for _ in range(50):
        request = world.arrive()
        world.step([(request, 45, 0, 0)])
        world.leave(request)
    assert world.book.staged_blocks == 0 and world.book.rows == 8


@pytest.mark.parametrize("scorer", ["minmax", "mean", "q2", "oracle"])
def test_the_bytes_are_the_scorers_own(scorer: str) -> None:
    world = World(32, scorer)
    request = world.arrive()
    for count in (50, 3, 27):
        world.step([(request, count, 0, 0)])


def test_keys_are_staged_in_the_models_format() -> None:
    world = World(16, key_dtype=torch.bfloat16)
    request = world.arrive()
    world.truth = world.truth.bfloat16().float()
    keys = torch.randn((16, HEADS, DIM)).bfloat16()
    request.blocks = [world.free.pop(0)]
    for i in range(16):
        writes = world.book.write([Written(i, 1, 0, 0, request.blocks)])
        world.layer.apply(writes, keys[i : i + 1])
    expected = world.scorer.summarise(keys.unsqueeze(0)).transpose(0, 1)
    assert torch.equal(world.layer.store.get(torch.tensor(request.blocks)), expected)


def test_a_lost_row_is_found() -> None:
    book = SummaryBook(BLOCKS, 32)
    book.write([Written(0, 5, 0, 0, [3])])
    book.check_integrity()
    book._row[4] = book._row[3]
    with pytest.raises(AssertionError, match="stage rows"):
        book.check_integrity()


# --- at random


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["arrive", "hit", "step", "step", "step", "leave"]), min_size=20, max_size=60),
    st.sampled_from([16, 32, 64]),
    st.integers(0, 2**16),
)
def test_any_history_leaves_every_committed_block_summarised(history: list[str], block_size: int, seed: int) -> None:
    dice = random.Random(seed)
    world = World(block_size)
    running = [world.arrive()]
    for event in history:
        if event == "arrive" and len(world.free) > 30:
            running.append(world.arrive())
        elif event == "hit" and running:
            found = dice.choice(running)
            full = dice.randint(0, found.certain // block_size)
            running.append(world.arrive(found, full))
        elif event == "leave" and running:
            world.leave(running.pop(dice.randrange(len(running))))
        elif event == "step" and running:
            writes = []
            room = len(world.free) * block_size // 2
            for request in dice.sample(running, dice.randint(1, len(running))):
                drafted = dice.choice((0, 0, dice.randint(1, LOOKAHEAD)))
                count = drafted + dice.choice((1, 1, 1, dice.randint(1, 90)))
                if room < count + block_size:
                    break
                room -= count + block_size
                writes.append((request, count, drafted, dice.randint(0, drafted)))
            world.step(writes)
    for request in running:
        world.leave(request)
    assert world.book.staged_blocks == 0
