"""The demo's pure parts: the prompts, who answers right, the memory, the numbers, the verdict. No engine is started."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from oasiskv.bench.cells import Model
from oasiskv.bench.figures import figures
from oasiskv.bench.job import DENSE, OASIS, PLUS, Answer, Job, Run, Sample
from oasiskv.bench.probe import Probe
from oasiskv.core.geometry import Geometry
from oasiskv.core.settings import Settings
from oasiskv.demo.documents import FACTS, Prompt, build_prompts, is_right
from oasiskv.demo.outcome import Outcome
from oasiskv.demo.plan import make_jobs, memory_for
from oasiskv.demo.report import COLUMNS, formula, markdown, rows, verdict

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "num_attention_heads": 9,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
}
TOKEN = 2 * 30 * 3 * 64 * 2
"""Bytes of a token."""


class Words:
    """A tokenizer whose tokens are words; a full stop is a word of its own."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = []
        for word in text.replace(".", " . ").split():
            if word not in self.words:
                self.words.append(word)
            found.append(self.words.index(word))
        return found

    def text(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def essays(sentences: int) -> str:
    return " ".join(f"word{i} and more of it." for i in range(sentences))


# -- documents


def test_every_prompt_has_exactly_the_wanted_length_and_ends_with_its_question() -> None:
    words = Words()
    for prompt in build_prompts(words.encode, essays(400), 200):
        assert len(prompt.ids) == 200
        assert words.text(prompt.ids).endswith(f"The special magic number for {prompt.city} is")


def test_the_fact_is_a_sentence_of_its_own_and_its_number_is_nowhere_else() -> None:
    words = Words()
    for prompt in build_prompts(words.encode, essays(400), 200):
        text = words.text(prompt.ids)
        assert f". The special magic number for {prompt.city} is {prompt.number} ." in text
        assert text.count(prompt.number) == 1


def test_facts_lie_at_different_depths_from_near_the_beginning_to_near_the_end() -> None:
    words = Words()
    prompts = build_prompts(words.encode, essays(1200), 600)
    depths = [prompt.ids.index(words.words.index(prompt.number)) / 600 for prompt in prompts]
    assert depths == sorted(depths)
    assert depths[0] < 0.15
    assert 0.8 < depths[-1] < 0.95


def test_documents_are_cut_from_places_that_do_not_overlap() -> None:
    words = Words()
    prompts = build_prompts(words.encode, essays(400), 200)
    starts = [{w for w in words.text(p.ids).split() if w.startswith("word")} for p in prompts]
    assert len(starts) == len(FACTS)
    assert sum(map(len, starts)) == len(set.union(*starts))


def test_a_text_that_is_too_short_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"60 tokens is too short for 8 documents of 200"):
        build_prompts(Words().encode, essays(10), 200)


@pytest.mark.parametrize("answer", [" 4812.", " 4812 and so on 17", "\nnumber 4812", " is 4812.\n\nThe number is 9"])
def test_an_answer_is_right_if_its_first_number_is_the_fact(answer: str) -> None:
    assert is_right(answer, "4812")


@pytest.mark.parametrize("answer", ["", " unknown", " 48125.", " 481", " 7. No, 4812", " " + "word " * 8 + "4812"])
def test_other_answers_are_wrong(answer: str) -> None:
    assert not is_right(answer, "4812")


# -- memory


def test_a_token_of_smollm2_takes_23040_bytes() -> None:
    assert Model.of("smollm2", "/model", SMOLLM2).token_bytes == TOKEN == 23_040


def test_the_pool_holds_fewer_than_three_requests_in_whole_blocks_of_both_sizes() -> None:
    memory = memory_for(TOKEN, 5996, 8)
    tokens, rest = divmod(memory.pool_bytes, memory.token_bytes)
    assert rest == 0
    assert tokens % 128 == 0
    assert 2 * 5996 < tokens < 3 * 5996


def test_the_host_pool_holds_all_requests() -> None:
    memory = memory_for(TOKEN, 5996, 8)
    assert memory.host_bytes > 8 * 5996 * memory.token_bytes


def test_the_rows_differ_in_memory_and_in_oasiskv_only() -> None:
    prompts = [Prompt([1, 2, 3] * 2000, city, number) for city, number in FACTS]
    memory, jobs = make_jobs(Model("smollm2", "/model", TOKEN, 8192, 49_152), prompts, 64, {"scorer": "box"})
    dense, oasis, plus = jobs
    assert [job.row for job in jobs] == [DENSE, OASIS, PLUS]
    assert dense.kv_bytes == oasis.kv_bytes == plus.kv_bytes - memory.host_bytes
    assert (dense.settings, plus.settings) == (None, None)
    assert oasis.settings == {"scorer": "box", "host_gib": memory.host_bytes / 2**30}
    assert dense.conversations == oasis.conversations == plus.conversations
    assert Job.from_json(oasis.to_json()) == oasis


# -- numbers


def outcome(row: str, right: int = 8, pool_blocks: int = 100, **changes: Any) -> Outcome:
    samples = (Sample(2.0, 1, 100, 0, ()), Sample(1.0, 2, 50, 1, (7,)), Sample(0.5, 2, 0, 2, (7, 5), fetched=300))
    answers = tuple(Answer(city, 0, 100, 0.0, 1.0, 2.0, 3, f" {number}.") for city, number in FACTS)
    run = Run(row, 32, pool_blocks, 1.0, 0, samples, answers)
    found = Outcome.of(run, [Prompt([1], city, number) for city, number in FACTS])
    return replace(found, right=right, figures=replace(figures(run), **changes))


def test_an_outcome_counts_the_right_answers() -> None:
    run = Run(
        DENSE, 32, 100, 1.0, 0, (), (Answer("Oslo", 0, 9, 0, 1, 2, 3, " 7035"), Answer("Lima", 0, 9, 0, 1, 2, 3, "1"))
    )
    found = Outcome.of(run, [Prompt([1], "Lima", "8157"), Prompt([1], "Oslo", "7035")])
    assert (found.right, found.answers) == (1, ("1", " 7035"))


def test_blocks_count_real_ids_and_hot_slots_of_decoding_requests_only() -> None:
    def block(number: int, null: bool = False) -> SimpleNamespace:
        return SimpleNamespace(block_id=number, is_null=null)

    def request(name: str, computed: int) -> SimpleNamespace:
        return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_prompt_tokens=64)

    held = {"a": [block(1), block(0, True), block(2)], "b": [block(3), block(4)]}
    ledger = SimpleNamespace(records={"a": SimpleNamespace(hot=[block(8), block(9)])})
    manager = SimpleNamespace(block_size=32, req_to_blocks=held, ledger=ledger)
    pool = SimpleNamespace(get_num_free_blocks=lambda: 50)
    cache = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[manager]), block_pool=pool)
    scheduler = SimpleNamespace(running=[request("a", 70), request("b", 63)], waiting=[], kv_cache_manager=cache)
    probe = Probe(SimpleNamespace(scheduler=scheduler))
    assert probe.blocks() == (4,)
    assert (probe.prefilled(), probe.prefilled()) == (64 + 63, 0)


# -- the report


def test_every_row_fills_every_column() -> None:
    memory = memory_for(TOKEN, 5996, 8)
    outcomes = [outcome(row) for row in (DENSE, OASIS, PLUS)]
    assert {len(cells) for cells in rows(outcomes, memory)} == {len(COLUMNS)}
    assert markdown(outcomes, memory).count("\n") == 4


def test_the_formula_is_the_designs() -> None:
    geometry = Geometry.of(Settings(budget_tokens=2048), 32)
    expected, line = formula(outcome(OASIS, pool_blocks=483, running=5), geometry, 5900)
    assert expected == (483 - 185) // 65 + 1 == 5
    assert "seen: 5" in line


def test_a_good_run_has_nothing_wrong() -> None:
    assert verdict([outcome(DENSE, running=2), outcome(OASIS, running=5)], 5) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"running": 3}, "OasisKV ran 3 requests at once, stock vLLM 2"),
        ({"right": 7}, "OasisKV answered 7 questions, stock vLLM 8"),
        ({"running": 7}, "by the formula it should be 5"),
    ],
)
def test_each_broken_promise_has_its_sentence(changes: dict[str, Any], sentence: str) -> None:
    wrong = verdict([outcome(DENSE, running=2), outcome(OASIS, **{"running": 5, **changes})], 5)
    assert any(sentence in found for found in wrong)
