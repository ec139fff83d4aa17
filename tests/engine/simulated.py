"""vLLM's real scheduler with our real manager, ledger and connector half, and a worker that only moves labels.

What a block of KV contains is simulated exactly: the label of a position is a hash of the salt and of all tokens up to
it, so a block that is stale, torn, overwritten too early or another tenant's is seen at once. The simulated worker does
what the metadata says and nothing else, and checks everything that it reads.
"""

from __future__ import annotations

import functools
import random
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oasiskv
from oasiskv.tiers.host import bytes_per_block
from oasiskv.vllm_plugin.host_index import EXACT
from oasiskv.vllm_plugin.metadata import State, StepMetadata, WorkerAck

BLOCK = 32
DRAFTS = 3
MOST_TOKENS = 900
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
VOCABULARY = 400
JUNK = -1


@functools.lru_cache(maxsize=32)
def _config(model: Path, residency: str, drafts: bool, host_gib: float, reuse: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = oasiskv.engine_args(
        residency=residency, budget_tokens=192, pipeline="inline", host_gib=host_gib, reuse_approximate=reuse
    )
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=MOST_TOKENS,
        block_size=BLOCK,
        max_num_batched_tokens=256,
        max_num_seqs=6,
        num_gpu_blocks_override=64,
        speculative_config=NGRAM if drafts else None,
        **arguments,
    ).create_engine_config()


def _kv_cache(config: Any, blocks: int) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from oasiskv.vllm_plugin.spec import OasisSpec

    model = config.model_config
    heads, size = model.get_total_num_kv_heads(), model.get_head_size()
    spec = OasisSpec(block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=torch.float32)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(model.get_total_num_hidden_layers())]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])


class Simulation:
    """One engine without a model. ``host_blocks``: size of its host pool."""

    def __init__(
        self,
        model: Path,
        residency: str = "bounded",
        blocks: int = 64,
        host_blocks: int = 60,
        drafts: bool = True,
        reuse: bool = True,
        seed: int = 0,
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from oasiskv.vllm_plugin import register
        from oasiskv.vllm_plugin.layout import layout_of
        from oasiskv.vllm_plugin.switch import settings_of

        register()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        probe = _config(model, "dense", False, 1.0, True)
        kv_cache = _kv_cache(probe, blocks)
        layout = layout_of(probe, kv_cache, settings_of(probe))
        host_bytes = (host_blocks + 0.5) * bytes_per_block(layout.shapes) + layout.device_summary_bytes
        config = _config(model, residency, drafts, host_bytes / (1 << 30), reuse)
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(config, kv_cache, StructuredOutputManager(config), block_size=BLOCK)
        self.half = self.scheduler.connector.scheduler
        self.pool = self.half.manager.block_pool
        assert residency in ("dense", "in_place") or self.half.layout.host_blocks == host_blocks
        self.reserved = self.half.layout.reserved_blocks
        self.reuse = reuse
        self.dice = random.Random(seed)
        self.drafting = drafts
        self.device = np.full((blocks, BLOCK), JUNK)
        self.device_exact = np.zeros((blocks, BLOCK), dtype=bool)
        self.host = np.full((self.half.layout.host_blocks, BLOCK), JUNK)
        self.host_exact = np.zeros_like(self.host, dtype=bool)
        self.tables: dict[str, list[int]] = {}
        self.host_map: dict[str, list[int]] = {}
        self.entries: dict[str, Any] = {}
        self.slots: dict[str, tuple[list[int], list[int]]] = {}
        self.parked: dict[str, np.ndarray] = {}
        self.chains: dict[str, list[int]] = {}
        self.label_of_hash: dict[bytes, int] = {}
        self.holding_acks = False
        self.copied_step = 0
        self.prompts: dict[str, list[int]] = {}
        self.done: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self._next = 0

    # -- what a user does

    def submit(self, prompt: list[int], max_tokens: int, salt: str | None = None, budget: int | None = None) -> str:
        """Add a request, as the engine core does."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        own = {} if budget is None else {"extra_args": {"oasis_budget_tokens": budget}}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **own)
        name, self._next = f"r{self._next}", self._next + 1
        self.prompts[name] = prompt
        self.scheduler.add_request(
            Request(name, prompt, params, None, cache_salt=salt, block_hasher=self.hasher, arrival_time=self._next)
        )
        return name

    def abort(self, name: str) -> None:
        """A client hangs up."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def preempt(self, name: str) -> None:
        """The scheduler takes a running request's blocks away."""
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())

    def reset(self) -> None:
        """The weights change: every cache forgets, who runs starts over."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.label_of_hash.clear()
        self.device[:] = self.host[:] = JUNK
        self.counts["resets"] += 1

    # -- one step

    def step(self) -> None:
        """Schedule, move labels, answer."""
        from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        self._begin(metadata)
        self._follow_tables(output)
        generated = {name: self._forward(name, output, metadata) for name in output.num_scheduled_tokens}
        for copy in metadata.copies.values():
            for device, host in zip(copy.device, copy.host, strict=True):
                if device >= 0:
                    self._copy_out(device, host)
        self.copied_step = metadata.step
        self._check_caches()
        ack = None if self.holding_acks else KVConnectorOutput(kv_connector_worker_meta=WorkerAck(self.copied_step))
        names = list(generated)
        for request_outputs in self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[generated[name] for name in names],
                kv_connector_output=ack,
            ),
        ).values():
            for one in request_outputs.outputs:
                self.done.setdefault(one.request_id, []).extend(one.new_token_ids)
        if self.drafting:
            alive = [n for n in names if generated[n] and n in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds(alive, [self._draft(n) for n in alive]))
        self.counts["steps"] += 1
        self.counts["tokens"] += sum(map(len, generated.values()))

    def _begin(self, metadata: StepMetadata) -> None:
        for park in metadata.parks:
            for device, host in park.rescued:
                self._copy_out(device, host)
            self.host_map[park.request_id] = list(park.host)
            self.slots.pop(park.request_id, None)
            del self.entries[park.request_id]
            self.counts["parks"] += 1
        for name in metadata.dropped:
            self.host_map.pop(name, None)
            self.slots.pop(name, None)
            self.entries.pop(name, None)
        for host, device in metadata.loads:
            assert (self.host[host] != JUNK).any(), f"host block {host} holds nothing"
            self.device[device], self.device_exact[device] = self.host[host], self.host_exact[host]
            self.counts["loads"] += 1
        self.counts["resumes"] += len(metadata.resumes)
        for name, copy in metadata.copies.items():
            known = self.host_map.get(name, [])
            assert len(known) >= copy.first, f"{name}: host blocks {len(known)} .. {copy.first} were never told"
            self.host_map[name] = known[: copy.first] + list(copy.host)

    def _copy_out(self, device: int, host: int) -> None:
        self.host[host], self.host_exact[host] = self.device[device], self.device_exact[device]

    def _follow_tables(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = list(ids[0])
            elif ids is not None:
                self.tables[name] += ids[0]

    def _forward(self, name: str, output: Any, metadata: StepMetadata) -> list[int]:
        request = self.scheduler.requests[name]
        count = output.num_scheduled_tokens[name]
        end = request.num_computed_tokens  # vLLM has counted this step's tokens already
        start = end - count
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        labels = self._labels(request)[: end - len(drafts)]
        for token in drafts:
            labels.append(_next_label(labels[-1], token))
        news = metadata.requests.get(name)
        if news is not None:
            self.entries[name] = news
            if news.hot:
                self._fill_slots(name, news)
        entry = self.entries.get(name)
        state = entry.state if entry is not None else State.DENSE
        exact = self._check_reads(name, request, start, labels, entry)
        self.counts[state.name] += 1
        where = np.arange(start, end)
        blocks = np.array(self.tables[name])[where // BLOCK]
        assert (blocks > 0).all() and (blocks < len(self.device) - self.reserved).all()
        self.device[blocks, where % BLOCK] = labels[start:end]
        self.device_exact[blocks, where % BLOCK] = exact and state in (State.DENSE, State.SEEDED)
        if entry is not None:
            newest = end - len(drafts) - 1
            assert entry.tail == tuple(self.tables[name][newest // BLOCK :][: len(entry.tail)]) != ()
        if end - len(drafts) < request.num_tokens:
            return []
        return self._generate(labels, end - len(drafts), drafts)

    def _generate(self, labels: list[int], certain: int, drafts: list[int]) -> list[int]:
        tokens, label = [], labels[certain - 1]
        for draft in [*drafts, None]:
            tokens.append(_answer(label))
            if tokens[-1] != draft:
                break
            label = _next_label(label, draft)
            self.counts["accepted"] += 1
        return tokens

    def _draft(self, name: str) -> list[int]:
        """Drafts that are often right; sometimes fewer, sometimes none."""
        label, tokens = self._labels(self.scheduler.requests[name])[-1], []
        for _ in range(self.dice.choice((0, 1, DRAFTS, DRAFTS))):
            tokens.append(_answer(label) if self.dice.random() < 0.7 else 1)
            label = _next_label(label, tokens[-1])
        return tokens

    def _labels(self, request: Any) -> list[int]:
        """Label of each position; the hash of each full block is remembered with it."""
        chain = self.chains.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        for i in range(len(chain), len(tokens)):
            chain.append(
                _next_label(chain[-1] if chain else zlib.crc32((request.cache_salt or "").encode()), tokens[i])
            )
        for i, block_hash in enumerate(request.block_hashes):
            self.label_of_hash[bytes(block_hash)] = chain[(i + 1) * BLOCK - 1]
        return list(chain)

    # -- what must hold

    def _check_reads(self, name: str, request: Any, start: int, labels: list[int], entry: Any) -> bool:
        """Everything that the request's attention may look at is its own KV. Returns whether all of it is exact."""
        table = self.tables[name]
        seen = np.arange(start)
        if entry is not None and entry.state == State.BOUNDED:
            sinks = self.half.layout.geometry.sinks
            seen = seen[(seen < sinks * BLOCK) | (seen >= entry.first_window * BLOCK)]
            self._check_slots(name, entry, labels)
        blocks = np.array(table)[seen // BLOCK]
        wrong = self.device[blocks, seen % BLOCK] != np.array(labels)[seen]
        assert not wrong.any(), f"{name}: position {seen[wrong][0]} of {start} is not its own KV (state {entry})"
        exact = bool(self.device_exact[blocks, seen % BLOCK].all())
        if not exact and (entry is None or entry.state == State.DENSE):
            bounded = self.half.settings.residency == "bounded" and self.half.ledger.host_blocks_for(request) > 0
            assert bounded and self.reuse, f"{name} stays dense, and was given approximate KV"
        return exact

    def _check_slots(self, name: str, entry: Any, labels: list[int]) -> None:
        sinks, own = self.half.layout.geometry.sinks, self.host_map[name]
        assert len(own) >= entry.first_window, f"{name}: {len(own)} host blocks, its middle has {entry.first_window}"
        hot, holds = self.slots[name]
        slot, block = self.dice.randrange(len(hot)), self.dice.randrange(sinks, entry.first_window)
        if block not in holds:
            self._fetch(own[block], hot[slot])
            holds[slot] = block
        for device, block in zip(hot, holds, strict=True):
            expected = labels[block * BLOCK : (block + 1) * BLOCK]
            assert self.device[device].tolist() == expected, f"{name}: hot slot {device} does not hold block {block}"

    def _fill_slots(self, name: str, entry: Any) -> None:
        holds = list(entry.hot_holds)
        free = [i for i in range(self.half.layout.geometry.sinks, entry.first_window) if i not in holds]
        for slot, block in enumerate(holds):
            if block < 0:
                holds[slot] = free.pop()
                self._fetch(self.host_map[name][holds[slot]], entry.hot[slot])
        self.slots[name] = (list(entry.hot), holds)

    def _fetch(self, host: int, device: int) -> None:
        self.device[device], self.device_exact[device] = self.host[host], self.host_exact[host]

    def _check_caches(self) -> None:
        """Whatever a new request could find is what its hash says, and as exact as it is said to be."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        for block in self.pool.blocks:
            if block.block_hash is not None:
                label = self.label_of_hash.get(bytes(get_block_hash(block.block_hash)))
                assert label is not None and self.device[block.block_id, -1] == label, f"stale block {block}"
                assert self.device_exact[block.block_id].all(), f"{block} in the prefix cache is approximate"
        index = self.half.ledger.index
        for block in index.pool.blocks if index is not None else ():
            if block.block_hash is not None and block.block_id not in index._unacknowledged:
                label = self.label_of_hash.get(bytes(get_block_hash(block.block_hash)))
                row = block.block_id - 1
                assert label is not None and self.host[row, -1] == label, f"stale host block {row}"
                if get_group_id(block.block_hash) == EXACT:
                    assert self.host_exact[row].all(), f"host block {row} is approximate, and said to be exact"

    def check(self) -> None:
        """All invariants of the design that the scheduler process can see, and that no block is lost or lent twice."""
        self.half.check_integrity()
        ledger, manager = self.half.ledger, self.half.manager
        held: Counter[int] = Counter()
        for table in manager.req_to_blocks.values():
            held.update(block.block_id for block in table if not block.is_null)
        for record in ledger.records.values():
            held.update(block.block_id for block in record.hot)
        last = len(self.pool.blocks) - self.reserved
        for block in self.pool.blocks[1:last]:
            assert block.ref_cnt == held[block.block_id], f"{block}: {held[block.block_id]} holders"
        free = sum(block.ref_cnt == 0 for block in self.pool.blocks[1:last])
        assert self.pool.get_num_free_blocks() == free
        assert set(ledger.records) | set(ledger.parked) <= set(self.scheduler.requests)
        assert not set(ledger.records) & set(ledger.parked)
        if ledger.index is not None:
            on_host: Counter[int] = Counter()
            for record in (*ledger.records.values(), *ledger.parked.values()):
                on_host.update(block.block_id for block in (*record.host, *record.spare))
                need = ledger.host_blocks_for(record.request)
                assert len(record.host) + len(record.spare) in (0, need), f"{record.request_id}: not its host blocks"
            for block in ledger.index.pool.blocks[1:]:
                assert block.ref_cnt == on_host[block.block_id], f"host {block}: {on_host[block.block_id]} holders"

    def finish(self) -> None:
        """Everything that was submitted ends, in a number of steps that can be counted; then nothing is left."""
        self.holding_acks = False
        remaining = sum(r.num_prompt_tokens + r.max_tokens for r in self.scheduler.requests.values())
        for _ in range(4 * remaining + 100):
            if not self.scheduler.requests:
                break
            self.step()
            self.check()
        assert not self.scheduler.requests, f"stuck: {list(self.scheduler.requests)}"
        self.submit([5, 6, 7], 1)
        self.step()
        self.check()
        ledger = self.half.ledger
        assert not ledger.records and not ledger.parked and not ledger.resuming and ledger.host_used() == 0
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1 - self.reserved
        assert set(self.host_map) <= ledger._announced | set(ledger._dropped)


def _next_label(label: int, token: int) -> int:
    return hash((label, token)) & (2**62 - 1)


def _answer(label: int) -> int:
    """What the simulated model says after a context."""
    return 5 + label % (VOCABULARY - 5)
