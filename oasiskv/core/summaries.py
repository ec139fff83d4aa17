"""Summaries belong to blocks: written when keys are written, found wherever the block is found.

A part (16 tokens) is summarised once all its tokens are committed: a rejected draft cannot be taken out of a minimum.
Until then its keys wait in a *stage*, a few natural-layout copies of partly filled blocks:

    keys of a step --+-- whole parts of a long chunk ----------------> summaries [KV head, block, part]
                     +-- the rest --> stage [row, token in block] ---> ... when its part is full and committed

The keys come from the attention layer's input, never from the cache, whose bytes the kernels pack.
:class:`SummaryBook` decides (once per step, for all layers); :class:`LayerSummaries` holds one layer's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from oasiskv.core.kernels import TwoBitWrites, copy_rows
from oasiskv.core.scorers import Scorer
from oasiskv.core.settings import PART_TOKENS

_BULK = 2 * PART_TOKENS
"""Chunks longer than this write their whole parts straight from the keys."""


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

    ``stage_tokens`` [s] of the batch go to ``stage_slots`` [s] (row * block_size + offset). Parts are summarised from
    the batch, from tokens ``bulk_first`` [n] on to ``bulk_parts`` [n], and from the stage, ``staged_first`` [m]
    to ``staged_parts`` [m]; a destination is block * parts + part.
    """

    stage_tokens: Tensor
    stage_slots: Tensor
    bulk_first: Tensor
    bulk_parts: Tensor
    staged_first: Tensor
    staged_parts: Tensor
    rows: int

    @cached_property
    def compiled(self) -> TwoBitWrites:
        """The same for the compiled kernel."""
        return TwoBitWrites(
            stage_tokens=self.stage_tokens,
            stage_slots=self.stage_slots,
            bulk_first=self.bulk_first,
            bulk_parts=self.bulk_parts,
            staged_first=self.staged_first,
            staged_parts=self.staged_parts,
        )


@dataclass(frozen=True)
class StagedTail:
    """A partly filled block that lost its place on the device: its stage row (-1: none), and its finished parts."""

    row: int
    done: int


class SummaryBook:
    """Which parts of which device block are summarised, and where unfinished blocks are staged."""

    def __init__(self, num_blocks: int, block_size: int, lookahead: int = 0) -> None:
        """``lookahead``: most draft tokens of a step."""
        self.block_size = block_size
        self.lookahead = lookahead
        self.parts = block_size // PART_TOKENS
        self.done = np.zeros(num_blocks, dtype=np.int16)
        """Finished parts of each device block."""
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
        """Requests left: complete the parts of their last blocks, ``(device block, committed tokens in it)``.

        The block ``keep`` goes on waiting for its other parts.
        """
        self._recycle()
        plan = _Plan()
        for block, filled in released:
            if self._row[block] >= 0:
                self._from_stage(block, filled // PART_TOKENS, plan)
                if block != keep:
                    self._leave(block)
        return plan.build(self.rows)

    def detach(self, block: int) -> StagedTail:
        """A request is preempted: keep what its last, partly filled block waits for."""
        tail = StagedTail(int(self._row[block]), int(self.done[block]))
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
            self.done[block] = self.parts

    def _write(self, request: Written, plan: _Plan) -> None:
        size, parts, blocks = self.block_size, self.parts, request.blocks
        start, end = request.start, request.start + request.count
        certain = end - request.uncertain
        for i in range(-(-start // size), (end - 1) // size + 1):  # blocks begun here: whatever they held is gone
            self.done[blocks[i]] = 0
            self._leave(blocks[i])
        low, high = -(-start // PART_TOKENS), certain // PART_TOKENS
        if certain - start <= _BULK or high <= low:
            low = high = -1
        if high >= 0:
            whole = np.arange(low, high)
            ids = np.asarray(blocks)[low // parts : (high - 1) // parts + 1].astype(np.int64)
            plan.bulk_first.append(whole * PART_TOKENS - start + request.first_token)
            plan.bulk_parts.append(ids[whole // parts - low // parts] * parts + whole % parts)
            loose = [*range(start, low * PART_TOKENS), *range(high * PART_TOKENS, end)]
        else:
            loose = list(range(start, end))
        for position in loose:
            block = blocks[position // size]
            if self._row[block] < 0:
                self._row[block] = self._take_row()
            plan.stage_tokens.append(request.first_token + position - start)
            plan.stage_slots.append(int(self._row[block]) * size + position % size)
        for i in range(max(low, 0) // parts, -(-high // parts) if high >= 0 else 0):
            first_bulk, last_bulk = max(low - i * parts, 0), min(high - i * parts, parts)
            self._from_stage(blocks[i], first_bulk, plan)
            self.done[blocks[i]] = last_bulk

    def _complete(self, request: Written, plan: _Plan) -> None:
        """Summarise staged parts that are full and certain now; accepted drafts may have filled earlier blocks."""
        size, parts, blocks = self.block_size, self.parts, request.blocks
        certain = request.start + request.count - request.uncertain
        for i in range(max(0, request.start - size - self.lookahead) // size, -(-certain // size)):
            block = blocks[i]
            if self.done[block] < parts:
                self._from_stage(block, min(parts, certain // PART_TOKENS - i * parts), plan)
            if self.done[block] >= parts:
                self._leave(block)

    def _from_stage(self, block: int, target: int, plan: _Plan) -> None:
        row = int(self._row[block])
        if row < 0:
            return
        for part in range(int(self.done[block]), target):
            plan.staged_first.append((row * self.parts + part) * PART_TOKENS)
            plan.staged_parts.append(int(block) * self.parts + part)
        self.done[block] = max(int(self.done[block]), target)

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
        unfinished = self.done < self.parts
        assert bool(unfinished[self._row >= 0].all()), "a finished block holds a stage row"
        everything = sorted(held + self._free + self._leaving + list(self._detached))
        assert everything == list(range(self.rows)), f"stage rows {everything} are not 0 .. {self.rows - 1}"


class LayerSummaries:
    """Summaries of one layer's device blocks, and the stage of its unfinished ones.

    ``store`` is uint8 ``[KV heads, blocks, parts, part_bytes]``, memory that the caller owns.
    """

    def __init__(self, scorer: Scorer, store: Tensor, block_size: int, key_dtype: torch.dtype) -> None:
        heads, _, self._parts, part_bytes = store.shape
        self.scorer = scorer
        self.store = store
        self._flat = store.view(heads, -1, part_bytes)
        self._stage = torch.zeros((0, block_size, heads, scorer.head_dim), dtype=key_dtype)
        self._compiled = scorer.compiled(self._flat, key_dtype)

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
        if keys is not None and len(writes.bulk_parts):
            self.scorer.write(keys, writes.bulk_first, self._flat, writes.bulk_parts)
        if len(writes.staged_first):
            self.scorer.write(self._stage.flatten(0, 1), writes.staged_first, self._flat, writes.staged_parts)


class _Plan:
    def __init__(self) -> None:
        self.stage_tokens: list[int] = []
        self.stage_slots: list[int] = []
        self.bulk_first: list[np.ndarray] = []
        self.bulk_parts: list[np.ndarray] = []
        self.staged_first: list[int] = []
        self.staged_parts: list[int] = []

    def build(self, rows: int) -> SummaryWrites:
        def joined(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0, dtype=torch.int64)

        def listed(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64)

        return SummaryWrites(
            stage_tokens=listed(self.stage_tokens),
            stage_slots=listed(self.stage_slots),
            bulk_first=joined(self.bulk_first),
            bulk_parts=joined(self.bulk_parts),
            staged_first=listed(self.staged_first),
            staged_parts=listed(self.staged_parts),
            rows=rows,
        )
