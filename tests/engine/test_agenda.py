"""When the scheduler half looks at a request."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from oasiskv.vllm_plugin.agenda import NEVER, Agenda


@dataclass
class One:
    request_id: str
    due: int = NEVER


def test_what_was_said_last_holds() -> None:
    agenda: Agenda[One] = Agenda()
    a, b, c = One("a"), One("b"), One("c")
    agenda.soon(a)
    agenda.at(a, 3)
    agenda.at(b, 2)
    agenda.soon(b)
    agenda.at(c, 2)
    agenda.at(c, 2)
    assert agenda.take(1) == [b]
    assert agenda.take(2) == [c]
    assert agenda.take(3) == [a]
    assert agenda.take(4) == []


def test_who_has_left_is_not_looked_at_and_who_comes_with_the_same_name_is() -> None:
    agenda: Agenda[One] = Agenda()
    gone, late, new = One("a"), One("b"), One("a")
    agenda.soon(gone)
    agenda.at(late, 1)
    for one in (gone, late):
        agenda.drop(one)
    agenda.soon(new)
    assert agenda.take(1) == [new]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_everyone_is_due_exactly_when_it_was_said_last(calls: list[tuple[int, int]]) -> None:
    agenda: Agenda[One] = Agenda()
    ones = [One(str(i)) for i in range(4)]
    expected: dict[str, int] = {}
    for step, (who, when) in enumerate(calls, 1):
        taken = sorted(one.request_id for one in agenda.take(step))
        assert taken == sorted(name for name, due in expected.items() if due == step)
        expected = {name: due for name, due in expected.items() if due != step}
        if when:
            agenda.at(ones[who], step + when)
        else:
            agenda.soon(ones[who])
        expected[str(who)] = step + max(1, when)
