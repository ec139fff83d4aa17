"""Which requests the scheduler half looks at in which step: nearly all of them change nothing in nearly all steps."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

NEVER, SOON = -1, 0
"""In the place of a step's number, which starts at 1: not at all; in the next step."""


class Entry(Protocol):
    """What can be on the agenda. ``due``: its step, which only the agenda sets."""

    due: int

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""


E = TypeVar("E", bound=Entry)


class Agenda(Generic[E]):
    """Entries by the step in which they are due: what was said last of an entry holds."""

    def __init__(self) -> None:
        self._soon: dict[str, E] = {}
        self._later: dict[int, dict[str, E]] = {}

    def soon(self, entry: E) -> None:
        """Look at it in the next step."""
        entry.due = SOON
        self._soon[entry.request_id] = entry

    def at(self, entry: E, step: int) -> None:
        """Look at it in ``step``, which has not been taken yet."""
        entry.due = step
        self._later.setdefault(step, {})[entry.request_id] = entry

    def drop(self, entry: E) -> None:
        """Its request has left."""
        entry.due = NEVER

    def take(self, step: int) -> list[E]:
        """Everything that is due in ``step``. To be called for each step, one after another."""
        soon, self._soon = self._soon, {}
        due = [entry for entry in soon.values() if entry.due == SOON]
        return due + [entry for entry in self._later.pop(step, {}).values() if entry.due == step]
