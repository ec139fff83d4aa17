"""What the process of one engine is told, and what it answers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DENSE, OASIS, PLUS, LIMIT = "dense", "oasis", "dense_plus_host", "limit"
"""Stock vLLM; OasisKV in the same KV pool; stock vLLM with the host pool's bytes too; stock vLLM on contexts as long as
the budget: as fast as a step can be that attends to the budget only."""


@dataclass(frozen=True)
class Turn:
    """Token ids that are added to the conversation, and how many tokens are answered."""

    tokens: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Conversation:
    """Turns that follow one another, each on top of all before and their answers. A plain request has one."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return sum(len(turn.tokens) + turn.output for turn in self.turns)


@dataclass(frozen=True)
class Job:
    """One engine's work.

    ``kv_bytes``: its KV pool. ``settings``: OasisKV's (None: vLLM as it is, the plug-in not even loaded). ``engine``:
    fields of vLLM's ``EngineArgs``; ``options``: vLLM's command-line options, on top. ``concurrency``: most requests in
    flight. ``fill``: prompts are not computed; their KV is drawn.
    """

    row: str
    model: str
    conversations: tuple[Conversation, ...]
    concurrency: int
    max_model_len: int
    kv_bytes: int
    settings: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    fill: bool = False
    warm_up: int = 40
    """Prompt tokens of the request before all others: where OasisKV is on, enough to make it bounded."""

    @property
    def output_tokens(self) -> int:
        """Of all conversations."""
        return sum(turn.output for c in self.conversations for turn in c.turns)

    @property
    def prompt_tokens(self) -> int:
        """New ones in all turns, answers not."""
        return sum(len(turn.tokens) for c in self.conversations for turn in c.turns)

    @property
    def engine_key(self) -> str:
        """The same for jobs that one engine can run, one after another."""
        return replace(self, conversations=(), concurrency=0).to_json()

    def to_json(self) -> str:
        """One line for the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The reverse of :meth:`to_json`."""
        values = json.loads(line)
        values["conversations"] = tuple(
            Conversation(c["name"], tuple(Turn(tuple(t["tokens"]), t["output"]) for t in c["turns"]))
            for c in values["conversations"]
        )
        values["options"] = tuple(values["options"])
        return cls(**values)


@dataclass(frozen=True)
class Sample:
    """One step. ``blocks``: device blocks of each request that decodes after it; ``fetched``: host bytes brought in;
    ``pipeline``: seconds of scoring and planning, in whichever thread. ``answering``: requests that got new tokens;
    ``shortest``: context of the shortest that decodes; ``scheduler``: seconds in vLLM's scheduler, ours in it."""

    seconds: float
    running: int
    prefilled: int
    new_tokens: int
    blocks: tuple[int, ...]
    fetched: int = 0
    pipeline: float = 0.0
    answering: int = 0
    shortest: int = 0
    scheduler: float = 0.0

    @property
    def only_decodes(self) -> bool:
        """No prompt token was computed in it."""
        return self.prefilled == 0 and self.new_tokens > 0


@dataclass(frozen=True)
class Answer:
    """One answered turn; times in seconds from the start of the run."""

    name: str
    turn: int
    prompt_tokens: int
    arrived: float
    first: float
    last: float
    tokens: int
    text: str = ""


@dataclass(frozen=True)
class Run:
    """What an engine did. ``pool_blocks``: free before the first request came. ``states``: most requests at once in
    each of OasisKV's states."""

    row: str
    block_size: int
    pool_blocks: int
    load_seconds: float
    preemptions: int
    samples: tuple[Sample, ...]
    answers: tuple[Answer, ...]
    states: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """The reverse of :meth:`as_dict`."""
        samples = tuple(Sample(**s | {"blocks": tuple(s["blocks"])}) for s in values["samples"])
        return cls(**values | {"samples": samples, "answers": tuple(Answer(**a) for a in values["answers"])})
