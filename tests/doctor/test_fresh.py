"""A Python that dies, hangs or does not start is an error of the section it was in, and the rest goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts import OK

from oasiskv.doctor.finding import Check, Finding, Skipped, run_checks
from oasiskv.doctor.fresh import Answers, ask
from oasiskv.doctor.sections import error_text


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """A module that takes the place of the real questions."""
    (folder / "questions.py").write_text(
        f'import os, sys, time\nprint(\'{{"section": "first"}}\', flush=True)\n{code}\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "questions"


def broken_line(answers: Answers, section: str) -> str:
    (found,) = run_checks([Check("t", section, lambda: Finding("t", OK, str(answers[section])))])
    return found.text


def test_a_python_that_dies_is_an_error_of_the_section_it_died_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ask(module=module(tmp_path, monkeypatch, "os.kill(os.getpid(), 11)"))
    assert broken_line(answers, "first") == "first: Python died here with SIGSEGV"
    with pytest.raises(Skipped):
        answers["second"]


def test_a_python_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ask(module=module(tmp_path, monkeypatch, "time.sleep(60)"), limit_seconds=2)
    assert broken_line(answers, "first") == "first: no answer within 2 s"


def test_a_python_that_does_not_start_says_why() -> None:
    assert "No module named oasiskv.no_such" in broken_line(ask(module="oasiskv.no_such"), "first")


def test_a_section_that_needs_a_failed_one_says_nothing() -> None:
    answers = Answers([{"section": "vllm", "error": "gone"}, {"section": "plugin", "needs": "vllm"}])
    assert broken_line(answers, "vllm") == "vllm: gone"
    with pytest.raises(Skipped):
        answers["plugin"]


def test_of_a_pydantic_error_the_message_inside_is_shown() -> None:
    from pydantic import TypeAdapter, ValidationError

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("x")
    assert error_text(caught.value).startswith("Input should be a valid integer")
    assert error_text(RuntimeError("one\ntwo")) == "RuntimeError: one"
