"""One step as the attention layers see it: which rows attend to what, resolved once and shared by all layers.

    rows of the batch -+- dense, prefilling, seeding: vLLM's own table    }  one call of the kernel
                       +- bounded: [sinks | hot slots | window | tail]    }
                       +- in_place: a table per layer (and KV head)          a second call

A block id names an independent page in every layer and KV head, so one table serves all layers for bounded rows; what
differs is which logical block's bytes lie in a slot. Keys carry RoPE, so attention over a compacted table is exact
for its set.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from oasiskv.core.decode_attention import DecodeBatch
from oasiskv.core.page_scores import Candidates
from oasiskv.core.predictor import query_rows_batch
from oasiskv.core.score_and_swap import SwapBatch
from oasiskv.core.summaries import SummaryWrites, Written
from oasiskv.vllm_plugin.metadata import State

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from oasiskv.vllm_plugin.worker import Held, Worker


@dataclass
class Batch:
    """Rows of one kernel call. ``tokens`` picks theirs out of the step's (None: all, in order).

    ``longest``: most tokens of a row. ``scheduler`` is the plan of vLLM's CPU kernel, ``decode`` that of ours; either
    depends on lengths and tables only, so that one serves all layers.
    """

    tokens: Tensor | None
    query_start_loc: Tensor
    longest: int
    seq_lens: Tensor
    block_table: Tensor
    scheduler: Tensor | None = None
    decode: DecodeBatch | None = None


@dataclass
class InPlaceRows:
    """Rows whose tables differ by layer (and KV head). ``heads`` is 1 with one set per layer.

    ``fixed`` int32 ``[R, 1, width]``: the table without its chosen part, which fills columns ``sinks .. sinks + H - 1``
    where ``chosen`` bool ``[R, 1, H]``. ``device`` int32 ``[R, blocks]``: device block of each logical block. Each KV
    head is a request of its own to the kernel: ``batch.tokens`` and ``head_of`` name the token and the head of each
    of its rows.
    """

    rows: Tensor
    heads: int
    sinks: int
    fixed: Tensor
    chosen: Tensor
    device: Tensor
    head_of: Tensor
    batch: Batch

    def tables(self, resident: Tensor) -> Tensor:
        """Tables ``[R * heads, width]`` for ``resident`` int32 ``[R, heads, H]``, in ids of (block, KV head) pages."""
        requests, heads, hot = resident.shape
        flat = resident.clamp_min(0).view(requests, -1).long()  # slots that a smaller budget does not have are EMPTY
        picked = self.device.gather(1, flat).view(requests, heads, hot)
        table = self.fixed.expand(-1, heads, -1).clone()
        columns = slice(self.sinks, self.sinks + hot)
        table[..., columns] = torch.where(self.chosen, picked, table[..., columns])
        if heads > 1:
            table = table * heads + torch.arange(heads, dtype=table.dtype).view(1, -1, 1)
        return table.view(requests * heads, -1)


@dataclass
class ScoreGroup:
    """Requests scored together: same summaries, same kind of result.

    ``members`` are their rows in the residency map, with the step in which each got it.
    ``most`` is the largest ``cap``. ``hot`` int64 ``[R, H]``: device blocks of the hot slots (bounded only). ``batch``:
    the same for the kernels, made by the first layer that needs it.
    """

    on_host: bool
    seeds: bool
    rows: Tensor
    members: list[tuple[int, int]]
    hot_of: Tensor
    cap: Tensor
    most: int
    hot: Tensor
    candidates: Candidates
    batch: SwapBatch | None = None


@dataclass
class StepView:
    """Everything the layers need of a step. ``main`` is None where no row attends through vLLM's call."""

    main: Batch | None
    in_place: InPlaceRows | None
    groups: list[ScoreGroup]
    writes: SummaryWrites | None
    rows: list[tuple[Held, int, int, int]]
    """Sparse rows: request, first token, tokens, context length with them."""
    is_stock: bool
    """No row differs from stock vLLM."""


def resolve(worker: Worker, common: CommonAttentionMetadata, draft_pass: int | None) -> StepView:
    """Cut a batch into the kernel calls, the scoring and the summaries of this step.

    ``draft_pass`` counts the drafter's passes of the step (None: the target's). Its first one covers the same tokens as
    the target's, and scores and summarises them for the drafter's own layers; the others are guesses.
    """
    drafting = draft_pass is not None
    starts = common.query_start_loc.tolist()
    if not drafting:
        worker.step_tokens = starts[-1]
    lens = common.seq_lens.tolist()
    table = common.block_table_tensor.numpy()
    size = worker.geometry.block_size
    main_rows: list[int] = []
    place_rows: list[tuple[int, Held]] = []
    sparse: list[tuple[Held, int, int, int]] = []
    compact: dict[int, Held] = {}
    scored: list[tuple[int, Held]] = []
    for i in range(common.num_reqs):
        held = worker.owner_of(table[i], lens[i]) if worker.held else None
        if held is not None and not draft_pass:
            scored.append((i, held))
        if held is None or held.state in (State.DENSE, State.SEEDED) or (drafting and held.state == State.IN_PLACE):
            main_rows.append(i)
            continue
        sparse.append((held, starts[i], starts[i + 1] - starts[i], lens[i]))
        if held.state == State.BOUNDED:
            compact[i] = held
            main_rows.append(i)
        else:
            place_rows.append((i, held))

    writes = None
    if not draft_pass:
        written = (
            _drafter_written(worker, common, table, starts, lens)
            if drafting
            else [
                Written(
                    start=lens[i] - (starts[i + 1] - starts[i]),
                    count=starts[i + 1] - starts[i],
                    uncertain=worker.drafts.get(int(table[i, (lens[i] - 1) // size]), 0),
                    first_token=starts[i],
                    blocks=table[i],
                )
                for i in range(common.num_reqs)
                if starts[i + 1] > starts[i]
            ]
        )
        writes = worker.writes_of(written, of_drafter=drafting)
    is_stock = not compact and not place_rows
    main = None
    if is_stock:
        pass
    elif main_rows:
        main = _main_batch(worker, common, table, starts, lens, main_rows, compact, everything=not place_rows)
    in_place = _in_place_rows(worker, table, starts, lens, place_rows) if place_rows else None
    newest = _newest_tokens(worker, common, starts, drafting) if scored else []
    groups = _score_groups(worker, table, newest, drafting, scored) if scored else []
    return StepView(main, in_place, groups, writes, sparse, is_stock)


def _drafter_written(
    worker: Worker, common: CommonAttentionMetadata, table: np.ndarray, starts: list[int], lens: list[int]
) -> list[Written]:
    """Tokens that the drafter's first pass writes: from where the target's began, some of them without a slot.

    How many there are differs by method, so that they are read off their slots. Those past the target's own are
    written again by the next step.
    """
    size, lookahead = worker.geometry.block_size, worker.books[1].blocks.lookahead
    slots = common.slot_mapping.numpy()
    extra = max(0, starts[-1] - worker.step_tokens) // max(1, common.num_reqs)
    written = []
    for i in range(common.num_reqs):
        (real,) = np.nonzero(slots[starts[i] : starts[i + 1]] >= 0)
        count = len(real)
        if not count:
            continue  # nothing of this row is kept
        block, offset = divmod(int(slots[starts[i] + real[0]]), size)
        last = (lens[i] - 1) // size
        first = max(0, (lens[i] - (starts[i + 1] - starts[i]) - lookahead) // size)
        (where,) = np.nonzero(table[i, first : last + 1] == block)
        if not len(where):
            continue  # a drafter that writes elsewhere: its layers choose by older summaries
        start = (first + int(where[-1])) * size + offset
        span = table[i, start // size : (start + count + lookahead) // size + 1]
        drafts = next((worker.drafts[b] for b in span.tolist() if b in worker.drafts), 0)
        uncertain = min(drafts + extra, count - 1)
        written.append(Written(start, count, uncertain, starts[i] + int(real[0]), table[i]))
    return written


def _newest_tokens(worker: Worker, common: CommonAttentionMetadata, starts: list[int], drafting: bool) -> list[int]:
    """The last token of each row; of a drafter's row the last one that has a slot."""
    if not drafting:
        return [start - 1 for start in starts[1:]]
    slots = common.slot_mapping.numpy()
    return [a + int(np.flatnonzero(slots[a:b] >= 0).max(initial=0)) for a, b in pairwise(starts)]


def _tokens_of(rows: list[int], starts: list[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i + 1]) for i in rows]))


def _starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def _main_batch(
    worker: Worker,
    common: CommonAttentionMetadata,
    table: np.ndarray,
    starts: list[int],
    lens: list[int],
    rows: list[int],
    compact: dict[int, Held],
    everything: bool,
) -> Batch:
    size, sinks = worker.geometry.block_size, worker.geometry.sinks
    tables, lengths = [], []
    for i in rows:
        held, used = compact.get(i), -(-lens[i] // size)
        if held is None:
            tables.append(table[i, :used])
            lengths.append(lens[i])
        else:
            tables.append(np.concatenate((table[i, :sinks], held.hot, table[i, held.first_window : used])))
            lengths.append((sinks + held.hot_count - held.first_window) * size + lens[i])
    block_table = np.zeros((len(rows), max(len(t) for t in tables)), dtype=np.int32)
    for k, ids in enumerate(tables):
        block_table[k, : len(ids)] = ids
    counts = [starts[i + 1] - starts[i] for i in rows]
    return Batch(
        tokens=None if everything else _tokens_of(rows, starts),
        query_start_loc=common.query_start_loc if everything else _starts_of(counts),
        longest=max(counts),
        seq_lens=torch.tensor(lengths, dtype=common.seq_lens.dtype),
        block_table=torch.from_numpy(block_table),
    )


def _in_place_rows(
    worker: Worker, table: np.ndarray, starts: list[int], lens: list[int], rows: list[tuple[int, Held]]
) -> InPlaceRows:
    size, sinks, heads = worker.geometry.block_size, worker.geometry.sinks, worker.map.heads
    hot = max(held.hot_count for _, held in rows)
    tails = [-(-lens[i] // size) - held.first_window for i, held in rows]
    fixed = np.zeros((len(rows), 1, sinks + hot + max(tails)), dtype=np.int32)
    lengths, tokens, counts, head_of = [], [], [], []
    for k, (i, held) in enumerate(rows):
        fixed[k, 0, :sinks] = table[i, :sinks]
        begin = sinks + held.hot_count
        fixed[k, 0, begin : begin + tails[k]] = table[i, held.first_window : held.first_window + tails[k]]
        lengths += [(begin - held.first_window) * size + lens[i]] * heads
        span = np.arange(starts[i], starts[i + 1])
        counts += [len(span)] * heads
        tokens += [span] * heads
        head_of += [np.full(len(span), head) for head in range(heads)]
    most = max(-(-lens[i] // size) for i, _ in rows)
    hot_of = torch.tensor([held.hot_count for _, held in rows])
    batch = Batch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        query_start_loc=_starts_of(counts),
        longest=max(counts),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.empty(0),
    )
    return InPlaceRows(
        rows=torch.tensor([held.row for _, held in rows]),
        heads=heads,
        sinks=sinks,
        fixed=torch.from_numpy(fixed),
        chosen=(torch.arange(hot) < hot_of.view(-1, 1)).unsqueeze(1),
        device=torch.from_numpy(table[[i for i, _ in rows], :most].astype(np.int32)),
        head_of=torch.from_numpy(np.concatenate(head_of)),
        batch=batch,
    )


def _score_groups(
    worker: Worker, table: np.ndarray, newest: list[int], drafting: bool, scored: list[tuple[int, Held]]
) -> list[ScoreGroup]:
    kinds: dict[tuple[bool, bool], list[tuple[int, Held]]] = {}
    for i, held in scored:
        kinds.setdefault((held.state == State.BOUNDED, held.state == State.SEEDED), []).append((i, held))
    sinks = worker.geometry.sinks
    groups = []
    for (on_host, seeds), members in kinds.items():
        most = max(held.first_window for _, held in members) - sinks
        index = np.zeros((len(members), most), dtype=np.int64)
        hot = np.zeros((len(members), worker.map.hot), dtype=np.int64)
        counts = []
        for k, (i, held) in enumerate(members):
            hot[k, : len(held.hot)] = held.hot
            source = worker.host_blocks[held.request_id] if on_host else table[i]
            count = held.first_window - sinks
            index[k, :count] = source[sinks : held.first_window]
            counts.append(count)
        drafts = torch.tensor([0 if drafting else held.drafts for _, held in members])
        real = torch.tensor([0 if drafting else held.real_drafts for _, held in members])
        first = torch.tensor([newest[i] for i, _ in members]) - drafts
        caps = [worker.cap_of(held) for _, held in members]
        offsets, weight = query_rows_batch(drafts + 1, real, worker.settings.predictor)
        groups.append(
            ScoreGroup(
                on_host=on_host,
                seeds=seeds,
                rows=torch.tensor([held.row for _, held in members]),
                members=[(held.row, held.born) for _, held in members],
                hot_of=torch.tensor([held.hot_count for _, held in members]),
                cap=torch.tensor(caps),
                most=max(caps),
                hot=torch.from_numpy(hot),
                candidates=Candidates(
                    index=torch.from_numpy(index),
                    counts=torch.tensor(counts),
                    rows=first.view(-1, 1) + offsets,
                    row_counts=weight,
                ),
            )
        )
    return groups
