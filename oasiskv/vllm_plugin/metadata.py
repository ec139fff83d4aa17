"""What the scheduler half tells the workers in each step, and what they answer.

A step's metadata describes that very step. vLLM calls ``start_load_kv`` after its metadata builder but before the
forward pass, and our attention metadata is resolved only when the first layer asks for it: so nothing has to be
announced a step ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class State(IntEnum):
    """Where a request's KV lives; it only ever goes forwards.

    DENSE: vLLM's own table. SEEDED: still dense in this step, whose queries choose the first set. IN_PLACE: full KV
    on the device, attention reads the chosen blocks. BOUNDED: the middle has left the device.
    """

    DENSE = 0
    SEEDED = 1
    IN_PLACE = 2
    BOUNDED = 3


@dataclass(frozen=True)
class RequestStep:
    """One sparse request that runs in this step; it holds for the steps after it until another one comes.

    ``tail`` names the device blocks from that of its newest certain token on, which nobody else can have: the row of
    the request is the one whose newest token lies in one of them. ``hot`` (device block ids) and ``hot_holds`` (which
    logical block lies there, -1: nothing yet) are sent once, when the request becomes bounded. Of the row's last
    ``drafts`` tokens the first ``real_drafts`` are real drafts, the others padding.
    """

    state: State
    tail: tuple[int, ...]
    first_window: int
    hot_count: int
    hot: tuple[int, ...] = ()
    hot_holds: tuple[int, ...] = ()
    budget_blocks: int = 0
    drafts: int = 0
    real_drafts: int = 0


@dataclass(frozen=True)
class CopyOut:
    """Host blocks of one request, logical ``first``, ``first + 1``, ...: full, committed blocks to copy there.

    A ``device`` block of -1: the copy is there already.
    """

    first: int
    device: tuple[int, ...]
    host: tuple[int, ...]


@dataclass(frozen=True)
class Park:
    """A bounded request that was preempted, and keeps its host blocks and its residency map.

    ``released`` are its last blocks, as in :class:`StepMetadata`; of them ``tail`` is only partly filled (-1: none is).
    ``rescued`` pairs device with host blocks, to be copied before the forward pass. ``host`` are all its host blocks.
    """

    request_id: str
    released: tuple[tuple[int, int], ...]
    tail: int
    rescued: tuple[tuple[int, int], ...]
    host: tuple[int, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, for step ``step``.

    ``released`` holds the tail blocks of requests that left (finished, aborted, preempted) with how many of their
    tokens are committed; ``dropped`` their ids. Both are applied before anything else. ``requests`` holds the sparse
    requests that are new, or of which something has changed. ``drafts`` counts the draft
    tokens of every request that has some, by the device block of its newest token. ``loads`` pairs host blocks with the
    device blocks that they are read into before the forward pass. ``parks`` and ``resumes`` (request, its tail block on
    the device): preempted requests that stop and go on.
    """

    step: int
    requests: dict[str, RequestStep] = field(default_factory=dict)
    copies: dict[str, CopyOut] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    drafts: dict[int, int] = field(default_factory=dict)
    loads: list[tuple[int, int]] = field(default_factory=list)
    parks: list[Park] = field(default_factory=list)
    resumes: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class WorkerAck(KVConnectorWorkerMetadata):
    """Workers to scheduler: all copies of the steps up to ``copied_step`` are durable on this rank."""

    copied_step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerAck:
        """A block is durable when the slowest rank has it."""
        assert isinstance(other, WorkerAck)
        return WorkerAck(min(self.copied_step, other.copied_step))
