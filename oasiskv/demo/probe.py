"""What an engine holds after each step, read from its scheduler and block manager; and what a whole run came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One step. ``blocks``: device blocks of each request that decodes after it; ``fetched``: host bytes brought in."""

    seconds: float
    running: int
    prefilled: int
    new_tokens: int
    blocks: tuple[int, ...]
    fetched: int = 0

    @property
    def only_decodes(self) -> bool:
        """No prompt token was computed in it."""
        return self.prefilled == 0 and self.new_tokens > 0


@dataclass(frozen=True)
class Outcome:
    """One row's numbers. ``seconds`` cover all prompts and all output, without loading the model.

    ``blocks_mean`` and ``blocks_most`` are over all decoding requests in all steps. ``decode_seconds`` and
    ``decode_tokens`` are of the steps that compute no prompt; ``steps`` counts those in which some request decodes.
    ``pool_blocks``: free before the first request came. ``states``: most requests at once in each of OasisKV's states.
    """

    row: str
    block_size: int
    pool_blocks: int
    load_seconds: float
    seconds: float
    running_max: int
    decoding_max: int
    blocks_mean: float
    blocks_most: int
    output_tokens: int
    decode_seconds: float
    decode_tokens: int
    steps: int
    fetched_bytes: int
    preemptions: int
    right: int
    answers: tuple[str, ...]
    states: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens by the seconds of the whole run, prompts included."""
        return self.output_tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Output tokens per second in the steps that only decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def fetched_per_step(self) -> float:
        """Bytes from the host pool by steps in which some request decoded."""
        return self.fetched_bytes / max(1, self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived rates, for JSON."""
        rates = ("tokens_per_second", "decode_rate", "fetched_per_step")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        """The reverse of :meth:`as_dict`."""
        fields = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"answers": tuple(fields["answers"])})


def summarise(samples: Sequence[Sample], **known: Any) -> Outcome:
    """Put the steps of a run together; ``known`` are the fields that samples do not tell."""
    held = [blocks for sample in samples for blocks in sample.blocks]
    decoding = [sample for sample in samples if sample.only_decodes]
    return Outcome(
        seconds=sum(s.seconds for s in samples),
        running_max=max((s.running for s in samples), default=0),
        decoding_max=max((len(s.blocks) for s in samples), default=0),
        blocks_mean=sum(held) / max(1, len(held)),
        blocks_most=max(held, default=0),
        output_tokens=sum(s.new_tokens for s in samples),
        decode_seconds=sum(s.seconds for s in decoding),
        decode_tokens=sum(s.new_tokens for s in decoding),
        steps=sum(bool(s.blocks) for s in samples),
        fetched_bytes=sum(s.fetched for s in samples),
        **known,
    )


class Probe:
    """Reads an engine core that runs in this process."""

    def __init__(self, core: Any) -> None:
        self.scheduler = core.scheduler
        cache = self.scheduler.kv_cache_manager
        (self.manager,) = cache.coordinator.single_type_managers
        self.pool_blocks = int(cache.block_pool.get_num_free_blocks())
        self.block_size = int(self.manager.block_size)
        self._computed: dict[str, int] = {}

    def running(self) -> int:
        """Requests that run, as vLLM counts them: prompt or output under way."""
        return len(self.scheduler.running)

    def prefilled(self) -> int:
        """Prompt tokens computed since the last call (a preempted request starts over)."""
        new = 0
        for request in self.scheduler.running:
            now = min(request.num_computed_tokens, request.num_prompt_tokens)
            new += max(0, now - self._computed.get(request.request_id, 0))
            self._computed[request.request_id] = now
        for request in self.scheduler.waiting:
            self._computed[request.request_id] = request.num_computed_tokens
        return new

    def blocks(self) -> tuple[int, ...]:
        """Device blocks of each request whose prompt is done: real ids only, hot slots with them."""
        decoding = (r for r in self.scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens)
        return tuple(self._held(request.request_id) for request in decoding)

    def _held(self, request_id: str) -> int:
        ids = {block.block_id for block in self.manager.req_to_blocks[request_id] if not block.is_null}
        ledger = getattr(self.manager, "ledger", None)
        record = ledger.records.get(request_id) if ledger is not None else None
        if record is not None:
            ids |= {block.block_id for block in record.hot}
        return len(ids)
