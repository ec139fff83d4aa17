"""Variable tracking: chains of assignments scattered over essays. What does this variable come down to?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from oasiskv.eval.tasks.haystack import hide
from oasiskv.eval.tasks.types import Document, Encode, Question
from oasiskv.models.data import essays

HEADER = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
ASSIGNMENT = " {name} = {value}."
QUESTION = (
    "\n\nQuestion: Which value is assigned to {name} in the text above? "
    "Answer: According to the chain(s) of variable assignment in the text above, {name} ="
)
LETTERS, DIGITS = 5, 5
SLACK = 4
"""Tokens that a free answer may take beyond the right one: too few for another variable."""


@dataclass(frozen=True)
class VariableTracking:
    """The chains of RULER (Hsieh et al., 2024), one for each question about a document, all of them interleaved.

    RULER goes down a chain, from its value to all its variables; here the answer goes up, ``VAR C = VAR B = VAR A =
    12345``: a small model finds what follows a name that it has just written, not what precedes it.
    """

    name: str
    hops: int = 4
    """Assignments of a variable to a variable in each chain."""
    text: Callable[[], str] = essays

    def document(self, encode: Encode, tokens: int, questions: int, seed: int) -> Document:
        """Exactly ``tokens`` tokens, with ``questions`` chains of ``hops`` + 1 assignments."""
        source = Random(seed)
        chains = [_chain(source, self.hops + 1) for _ in range(questions)]
        assignments = [
            [ASSIGNMENT.format(name=name, value=value) for value, name in pairwise(chain)] for chain in chains
        ]
        turns = [number for number in range(questions) for _ in assignments[number]]
        source.shuffle(turns)
        needles = [assignments[number].pop(0) for number in turns]
        header = list(encode(HEADER))
        body = hide(encode, self.text(), needles, tokens - len(header), seed)
        found = []
        for chain in chains:
            last, *others = reversed(chain)
            answer = list(encode(" " + " = ".join(others)))
            expected = tuple(other.removeprefix("VAR ") for other in others)
            found.append(Question(list(encode(QUESTION.format(name=last))), answer, expected, len(answer) + SLACK))
        return Document(self.name, header + body, tuple(found))

    def score(self, question: Question, answer: str) -> float:
        """Share of the chain, from the variable asked for to the value, that the answer names."""
        return question.recall(answer)


def _chain(source: Random, variables: int) -> list[str]:
    """A value, then the variables in the order of their assignment."""
    value = str(source.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    return [value, *("VAR " + "".join(source.choices(ascii_uppercase, k=LETTERS)) for _ in range(variables))]
