"""An independent check of every attention row: reference attention over exactly the resident set.

Keys and values are captured at the attention layer's input, before any cache; nothing is read back from pages. For
each row the reference works out the positions that the row may see (sinks, the blocks that the residency map names,
window, tail) and attends to the captured keys there, in float64, so that its own error does not count. It knows
nothing of tables, slots, packing or copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oasiskv.vllm_plugin.backend_cpu import active_worker
from oasiskv.vllm_plugin.metadata import State


@dataclass
class Report:
    """Rows checked and worst absolute error, by state; ``choices`` is what each step chose, for comparing runs."""

    rows: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    most_blocks: int = 0
    choices: dict[tuple[str, int, int], Any] = field(default_factory=dict)

    def note(self, state: str, rows: int, error: float) -> None:
        self.rows[state] = self.rows.get(state, 0) + rows
        self.worst[state] = max(self.worst.get(state, 0.0), error)

    def __str__(self) -> str:
        return ", ".join(f"{s}: {self.rows[s]} rows, worst error {self.worst[s]:.2e}" for s in sorted(self.rows))


class Verifier:
    """Install with ``worker.observer = Verifier(worker)``."""

    def __init__(self, worker: Any, record_choices: bool = False) -> None:
        self.worker = worker
        self.report = Report()
        self.record_choices = record_choices
        self.size = worker.geometry.block_size
        self.real = torch.empty(0)
        self.by_slot: dict[int, tuple[Tensor, Tensor]] = {}
        self.by_host: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.loaded: dict[int, int] = {}
        self.by_request: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, view: Any, metadata: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        common = metadata.common
        starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
        table = common.block_table_tensor
        self._follow_loads(layer, key)
        self._capture(layer, common.slot_mapping, key, value)
        self._follow_copies(layer)
        sparse = {(held.request_id, held.born) for held, _, _, _ in view.rows}
        for i in range(common.num_reqs):
            count = starts[i + 1] - starts[i]
            if not count:
                continue
            self.real = common.slot_mapping[starts[i] : starts[i + 1]] >= 0  # a drafter pads with rows of no token
            if not self.real.any():
                continue
            held = self.worker.owner_of(table[i].numpy(), lens[i])
            if held is None:
                if count <= 8:
                    keys, values = self._dense(layer, table[i], lens[i])
                    self._compare("dense", layer, query, output, starts[i], count, lens[i], keys, values, None)
                continue
            keys, values = self._remember(layer, held, table[i], lens[i])
            if (held.request_id, held.born) not in sparse:
                if count <= 8:  # seeds its first set; or a drafter's pass, which sees everything in place
                    self._compare("dense", layer, query, output, starts[i], count, lens[i], keys, values, None)
            else:
                blocks = self._resident(layer, held, lens[i])
                state = held.state.name.lower() + (" draft" if self.worker.layout.layers[layer].is_draft else "")
                self._compare(state, layer, query, output, starts[i], count, lens[i], keys, values, blocks)
                if self.record_choices and not self.worker.layout.layers[layer].is_draft:
                    chosen = [sorted(b.tolist()) for b in self.worker.map.block[layer, held.row, :, : held.hot_count]]
                    self.report.choices[(held.request_id.split("-")[0], lens[i], layer)] = chosen

    def _follow_loads(self, layer: int, key: Tensor) -> None:
        """What the step moved before its forward pass: blocks saved from preempted requests, and blocks read back."""
        step = self.worker._metadata
        if self.loaded.get(layer) == step.step:
            return
        self.loaded[layer] = step.step
        self._slots(layer, key)
        for park in step.parks:
            for device, host in park.rescued:
                self._keep(layer, device, host)
        for host, device in step.loads:
            for mine, kept in zip(self.by_slot[layer], self.by_host[layer, host], strict=True):
                mine[self._span(device)] = kept

    def _follow_copies(self, layer: int) -> None:
        """Blocks that will be copied to the host once the step is done."""
        for copy in self.worker._metadata.copies.values():
            for device, host in zip(copy.device, copy.host, strict=True):
                if device >= 0:
                    self._keep(layer, device, host)

    def _keep(self, layer: int, device: int, host: int) -> None:
        keys, values = self.by_slot[layer]
        self.by_host[layer, host] = keys[self._span(device)].clone(), values[self._span(device)].clone()

    def _span(self, device: int) -> slice:
        return slice(device * self.size, (device + 1) * self.size)

    def _slots(self, layer: int, key: Tensor) -> None:
        if layer not in self.by_slot:
            total = self.worker.layout.device_blocks * self.size
            empty = torch.zeros((total, *key.shape[1:]))
            self.by_slot[layer] = (empty, empty.clone())

    def _capture(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        self._slots(layer, key)
        real = slots >= 0
        n = len(slots)
        self.by_slot[layer][0][slots[real]] = key[:n][real].float()
        self.by_slot[layer][1][slots[real]] = value[:n][real].float()

    def _dense(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        blocks = table[: -(-length // self.size)].long()
        slots = (blocks.view(-1, 1) * self.size + torch.arange(self.size)).view(-1)[:length]
        keys, values = self.by_slot[layer]
        return keys[slots], values[slots]

    def _remember(self, layer: int, held: Any, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        name = (held.request_id, held.born, layer)
        if name not in self.by_request or held.state != State.BOUNDED:
            self.by_request[name] = self._dense(layer, table, length)
        keys, values = self.by_request[name]
        if len(keys) < length:
            grow = torch.zeros((length - len(keys) + 512, *keys.shape[1:]))
            keys, values = torch.cat((keys, grow)), torch.cat((values, grow))
            self.by_request[name] = (keys, values)
        if held.state == State.BOUNDED:  # the middle is remembered; window and tail are where vLLM's table says
            begin = held.first_window * self.size
            now = self._dense(layer, table, length)
            keys[begin:length], values[begin:length] = now[0][begin:], now[1][begin:]
        return keys, values

    def _resident(self, layer: int, held: Any, length: int) -> list[list[int]]:
        sinks = self.worker.geometry.sinks
        chosen = self.worker.map.block[layer, held.row, :, : held.hot_count].tolist()
        if len(chosen) != self.worker.layout.layers[layer].shape.heads:  # one set for all heads
            assert all(own == chosen[0] for own in chosen)
            chosen = chosen[:1]
        tail = list(range(held.first_window, -(-length // self.size)))
        sets = [[*range(sinks), *blocks, *tail] for blocks in chosen]
        for blocks in sets:
            assert len(set(blocks)) == len(blocks), f"{held.request_id}: a block twice in {blocks}"
            assert all(sinks <= b < held.first_window for b in blocks[sinks : sinks + held.hot_count]), blocks
        self.report.most_blocks = max(self.report.most_blocks, len(sets[0]))
        return sets

    def _compare(
        self,
        state: str,
        layer: int,
        query: Tensor,
        output: Tensor,
        first: int,
        count: int,
        length: int,
        keys: Tensor,
        values: Tensor,
        blocks: list[list[int]] | None,
    ) -> None:
        heads, dim = keys.shape[1:]
        q = query[first : first + count].double().unflatten(1, (heads, -1))  # [rows, heads, group, D]
        got = output[first : first + count].double().view(q.shape)
        if blocks is None:
            positions = torch.arange(length).view(1, -1)
        else:  # every head sees as many blocks, and its tail is the same
            mine = torch.tensor([sorted(own) for own in blocks])
            positions = (mine.unsqueeze(-1) * self.size + torch.arange(self.size)).flatten(1)
            positions = positions[:, : positions.shape[1] - (-length) % self.size]
        seen = positions, torch.arange(heads).view(-1, 1)
        k, v = keys[seen].double(), values[seen].double()  # [heads, positions, D]
        logits = torch.einsum("thgd,hnd->thgn", q, k) * dim**-0.5
        own = torch.arange(length - count, length).view(-1, 1, 1, 1)
        weights = logits.masked_fill(positions.unsqueeze(1) > own, float("-inf")).softmax(-1)
        expected = torch.einsum("thgn,hnd->thgd", weights, v)
        error = (expected - got)[self.real].abs().max().item()
        self.report.note(state, int(self.real.sum()), error)


class VerifierExtension:
    """For ``worker_extension_cls``: the same check inside worker processes."""

    def verifier_start(self) -> None:
        worker = active_worker()
        worker.observer = Verifier(worker)

    def verifier_report(self) -> dict[str, Any]:
        worker = active_worker()
        with torch.inference_mode():
            worker.check_integrity()
        return vars(worker.observer.report)
