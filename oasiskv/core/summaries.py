"""Summaries belong to blocks: written when keys are written, found wherever the block is found.

A block is summarised once all its tokens are committed: a rejected draft cannot be taken out of a minimum. Until then
its keys wait in a *stage*, a few natural-layout copies of partly filled blocks:

    keys of a step --+-- whole blocks of a long chunk ---------------> summaries [KV head, block]
                     +-- the rest --> stage [row, token in block] ---> ... when its block is full and committed

The keys come from the attention layer's input, never from the cache, whose bytes the kernels pack.
:class:`SummaryBook` decides (once per step, for all layers); :class:`LayerSummaries` holds one layer's bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from oasiskv.core.kernels import TwoBitWrites, copy_rows
from oasiskv.core.scorers import Scorer
from oasiskv.core.summary_store import SummaryStore


@dataclass(frozen=True)
class Written:
    """Tokens of one request that this step writes.

    Positions ``start .. start + count - 1`` are tokens ``first_token ...`` of the batch; of them the last
    ``uncertain`` are drafts. ``blocks[i]`` is the device block of logical block i.
    """

    start: int
    count: int
    uncertain: int
    first_token: int
    blocks: Sequence[int] | np.ndarray


@dataclass(frozen=True)
class SummaryWrites:
    """What every layer does with the keys of a step. All int64; empty tensors mean nothing to do.

    ``stage_tokens`` [s] of the batch go to ``stage_slots`` [s] (row * block_size + offset). Blocks are summarised from
    the batch, ``bulk_blocks`` [n] from tokens ``bulk_first`` [n] on, and from the stage, ``staged_blocks`` [m] from
    rows ``staged_rows`` [m].
    """

    stage_tokens: Tensor
    stage_slots: Tensor
    bulk_first: Tensor
    bulk_blocks: Tensor
    staged_rows: Tensor
    staged_blocks: Tensor
    rows: int

    @cached_property
    def compiled(self) -> TwoBitWrites:
        """The same for the compiled kernel."""
        return TwoBitWrites(
            stage_tokens=self.stage_tokens,
            stage_slots=self.stage_slots,
            bulk_first=self.bulk_first,
            bulk_blocks=self.bulk_blocks,
            staged_rows=self.staged_rows,
            staged_blocks=self.staged_blocks,
        )


@dataclass(frozen=True)
class StagedTail:
    """A partly filled block that lost its place on the device: its stage row (-1: none); whether it is summarised."""

    row: int
    done: bool


class SummaryBook:
    """Which device blocks are summarised, and where unfinished ones are staged."""

    def __init__(self, num_blocks: int, block_size: int, lookahead: int = 0) -> None:
        """``lookahead``: most draft tokens of a step."""
        self.block_size = block_size
        self.lookahead = lookahead
        self.done = np.zeros(num_blocks, dtype=bool)
        """Whether each device block is summarised."""
        self._row = np.full(num_blocks, -1, dtype=np.int64)
        self._free: list[int] = []
        self._leaving: list[int] = []
        self._detached: set[int] = set()
        self.rows = 0
        """Stage rows there are; the layers grow theirs to it."""

    @property
    def staged_blocks(self) -> int:
        """Blocks that hold a stage row."""
        return int((self._row >= 0).sum())

    def write(self, requests: Sequence[Written]) -> SummaryWrites:
        """Plan for the keys of one step.

        In two passes: a request may have hit a block that another one, in a later row, completes in this very step.
        """
        self._recycle()
        plan = _Plan()
        for request in requests:
            self._write(request, plan)
        for request in requests:
            self._complete(request, plan)
        return plan.build(self.rows)

    def finish(self, released: Iterable[tuple[int, int]], keep: int = -1) -> SummaryWrites:
        """Requests left: summarise such of their last blocks, ``(device block, committed tokens in it)``, as are full.

        The block ``keep`` goes on waiting for its other tokens.
        """
        self._recycle()
        plan = _Plan()
        for block, filled in released:
            if self._row[block] >= 0:
                if filled >= self.block_size:
                    self._from_stage(block, plan)
                if block != keep:
                    self._leave(block)
        return plan.build(self.rows)

    def detach(self, block: int) -> StagedTail:
        """A request is preempted: keep what its last, partly filled block waits for."""
        tail = StagedTail(int(self._row[block]), bool(self.done[block]))
        self._row[block] = -1
        if tail.row >= 0:
            self._detached.add(tail.row)
        return tail

    def attach(self, tail: StagedTail, block: int) -> None:
        """It goes on, with that block in the device block ``block``."""
        self._detached.discard(tail.row)
        self._row[block], self.done[block] = tail.row, tail.done

    def discard(self, tail: StagedTail) -> None:
        """It will not go on."""
        if tail.row >= 0:
            self._detached.discard(tail.row)
            self._leaving.append(tail.row)

    def restore(self, blocks: Iterable[int]) -> None:
        """These device blocks were filled from elsewhere, with all their summaries."""
        for block in blocks:
            self._leave(block)
            self.done[block] = True

    def _write(self, request: Written, plan: _Plan) -> None:
        size, blocks = self.block_size, request.blocks
        start, end = request.start, request.start + request.count
        low, high = -(-start // size), (end - request.uncertain) // size  # whole blocks that are certain
        for i in range(low, (end - 1) // size + 1):  # blocks begun here: whatever they held is gone
            self.done[blocks[i]] = False
            self._leave(blocks[i])
        loose = [range(start, end)]
        if high > low:
            whole = np.arange(low, high)
            ids = np.asarray(blocks)[low:high].astype(np.int64)
            plan.bulk_first.append(whole * size - start + request.first_token)
            plan.bulk_blocks.append(ids)
            self.done[ids] = True
            loose = [range(start, low * size), range(high * size, end)]
        for position in itertools.chain(*loose):
            block = blocks[position // size]
            if self._row[block] < 0:
                self._row[block] = self._take_row()
            plan.stage_tokens.append(request.first_token + position - start)
            plan.stage_slots.append(int(self._row[block]) * size + position % size)

    def _complete(self, request: Written, plan: _Plan) -> None:
        """Summarise staged blocks that are full and certain now; accepted drafts may have filled earlier ones."""
        size, blocks = self.block_size, request.blocks
        certain = request.start + request.count - request.uncertain
        for i in range(max(0, request.start - size - self.lookahead) // size, -(-certain // size)):
            if (i + 1) * size <= certain:
                self._from_stage(blocks[i], plan)
            if self.done[blocks[i]]:
                self._leave(blocks[i])

    def _from_stage(self, block: int, plan: _Plan) -> None:
        row = int(self._row[block])
        if row >= 0 and not self.done[block]:
            plan.staged_rows.append(row)
            plan.staged_blocks.append(int(block))
            self.done[block] = True

    def _leave(self, block: int) -> None:
        """Give the stage row back, but not before the layers have read it in this step."""
        if self._row[block] >= 0:
            self._leaving.append(int(self._row[block]))
            self._row[block] = -1

    def _recycle(self) -> None:
        self._free += self._leaving
        self._leaving = []

    def _take_row(self) -> int:
        if not self._free:
            more = max(8, self.rows)
            self._free = list(range(self.rows + more - 1, self.rows - 1, -1))
            self.rows += more
        return self._free.pop()

    def check_integrity(self) -> None:
        """Every stage row is free, leaving, detached, or held by exactly one unfinished block.

        Raises:
            AssertionError: a row is lost or held twice.
        """
        held = self._row[self._row >= 0].tolist()
        assert not self.done[self._row >= 0].any(), "a finished block holds a stage row"
        everything = sorted(held + self._free + self._leaving + list(self._detached))
        assert everything == list(range(self.rows)), f"stage rows {everything} are not 0 .. {self.rows - 1}"


class LayerSummaries:
    """Summaries of one layer's device blocks, and the stage of its unfinished ones."""

    def __init__(self, scorer: Scorer, store: SummaryStore, block_size: int, key_dtype: torch.dtype) -> None:
        self.scorer = scorer
        self.store = store
        self._stage = torch.zeros((0, block_size, store.bodies.shape[0], scorer.head_dim), dtype=key_dtype)
        self._compiled = scorer.compiled(store, key_dtype)

    def apply(self, writes: SummaryWrites, keys: Tensor | None) -> None:
        """Carry out ``writes`` with this layer's ``keys`` ``[tokens, KV heads, D]`` (None: only from the stage)."""
        if writes.rows > self._stage.shape[0]:
            grown = self._stage.new_zeros((writes.rows, *self._stage.shape[1:]))
            grown[: self._stage.shape[0]] = self._stage
            self._stage = grown
            if self._compiled is not None:
                self._compiled.stage(grown.flatten(0, 1))
        if self._compiled is not None:
            self._compiled.write(writes.compiled, keys)
            return
        if keys is not None and len(writes.stage_tokens):
            stage = self._stage.view(-1, self._stage.shape[2] * self._stage.shape[3])
            copy_rows(keys.flatten(1), writes.stage_tokens, stage, writes.stage_slots)
        if keys is not None and len(writes.bulk_blocks):
            tokens = writes.bulk_first.view(-1, 1) + torch.arange(self._stage.shape[1])
            self.store.put(writes.bulk_blocks, self.scorer.summarise(keys[tokens]))
        if len(writes.staged_blocks):
            self.store.put(writes.staged_blocks, self.scorer.summarise(self._stage[writes.staged_rows]))


class _Plan:
    def __init__(self) -> None:
        self.stage_tokens: list[int] = []
        self.stage_slots: list[int] = []
        self.bulk_first: list[np.ndarray] = []
        self.bulk_blocks: list[np.ndarray] = []
        self.staged_rows: list[int] = []
        self.staged_blocks: list[int] = []

    def build(self, rows: int) -> SummaryWrites:
        def joined(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0, dtype=torch.int64)

        def listed(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64)

        return SummaryWrites(
            stage_tokens=listed(self.stage_tokens),
            stage_slots=listed(self.stage_slots),
            bulk_first=joined(self.bulk_first),
            bulk_blocks=joined(self.bulk_blocks),
            staged_rows=listed(self.staged_rows),
            staged_blocks=listed(self.staged_blocks),
            rows=rows,
        )
