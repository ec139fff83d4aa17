"""The tasks: of the asked length, every answer in the document and nowhere else, scored as it should be."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from oasiskv.eval.tasks import TASKS, Document, Question
from oasiskv.eval.tasks.haystack import SENTENCE_END, hide, vocabulary

FILLED = {"kv-retrieval": 90, "common-words": 40, "many-shot-arithmetic": 200}
"""Tasks whose documents are lists, and the most tokens that these may fall short by; the others are exact."""
SYLLABLES = ("ba", "de", "fi", "go", "lu", "me", "ni", "po", "ra", "su")
WORDS = ["".join(word) for word in product(SYLLABLES, repeat=3)]
TEXT = "\n".join(f"Here {' and '.join(WORDS[i : i + 10])}. Then nothing." for i in range(0, 1000, 10)) * 3


class Pieces:
    """A tokenizer: words with the space before them, single digits, and other signs are tokens."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = []
        for piece in re.findall(r" ?[A-Za-z]+|\d|\s|.", text):
            if piece not in self.numbers:
                self.numbers[piece] = len(self.texts)
                self.texts.append(piece)
            found.append(self.numbers[piece])
        return found

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[i] for i in ids)


PIECES = Pieces()


def task(name: str) -> Any:
    found: Any = TASKS[name]
    return replace(found, text=lambda: TEXT) if hasattr(found, "text") else found


def document(name: str, tokens: int = 2000, questions: int = 3, seed: int = 0) -> Document:
    return task(name).document(PIECES.encode, tokens, questions, seed)


def texts(found: Document) -> tuple[str, list[tuple[str, str]]]:
    """The prompt; question and answer of each question."""
    asked = [(PIECES.decode(question.text), PIECES.decode(question.answer)) for question in found.questions]
    return PIECES.decode(found.prompt), asked


# -- what holds for all


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("tokens", [400, 3000, 20_000])
def test_documents_have_the_asked_length(name, tokens):
    length = len(document(name, tokens, questions=2).prompt)
    assert tokens - FILLED.get(name, 0) <= length <= tokens


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_decides_and_nothing_else(name):
    assert document(name, seed=4) == document(name, seed=4) != document(name, seed=5)
    assert document(name, seed=4).prompt != document(name, seed=5).prompt


@pytest.mark.parametrize("name", TASKS)
def test_questions_of_a_document_differ(name):
    found = document(name, questions=4)
    assert found.task == name
    assert len({(*question.text, *question.answer) for question in found.questions}) == 4


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_scores_one_and_fits_and_another_questions_scores_less(name):
    found = document(name)
    right, other = found.questions[:2]
    assert len(right.answer) <= right.max_tokens
    assert task(name).score(right, PIECES.decode(right.answer)) == 1
    assert task(name).score(right, "I do not know.") == 0
    if name != "common-words":  # whose questions have answers in common
        assert task(name).score(other, PIECES.decode(right.answer)) < 1


@pytest.mark.parametrize("name", TASKS)
def test_what_does_not_fit_is_refused(name):
    with pytest.raises(ValueError, match="tokens"):
        document(name, tokens=60)


def test_recall_counts_whole_words():
    question = Question([], [], ("1234567", "art"), 9)
    assert question.recall("They are 1234567 and art.") == 1
    assert question.recall("They are 12345678 and party; 1234567.") == 0.5


# -- needles


@pytest.mark.parametrize("name", ["needle-single", "needle-multikey", "needle-multivalue"])
def test_each_needle_is_a_sentence_after_a_sentence_and_its_numbers_stand_nowhere_else(name):
    prompt, asked = texts(document(name))
    for question, answer in asked:
        key = re.findall(r"for ([a-z]+-[a-z]+)", question)[0]
        needles = re.findall(rf"(?<=\.) (?:The|One of the) special magic numbers? for {key} is: (\d{{7}})\.", prompt)
        assert needles == re.findall(r"\d{7}", question + answer)
        assert all(prompt.count(number) == 1 for number in needles)


def test_a_quarter_of_the_multikey_document_are_lookalikes_with_other_keys():
    prompt, asked = texts(document("needle-multikey", tokens=4000))
    needles = re.findall(r" The special magic number for ([a-z]+-[a-z]+) is: \d{7}\.", prompt)
    assert len(set(needles)) == len(needles)
    size = len(PIECES.encode(" The special magic number for some-word is: 1234567."))
    assert 0.25 <= len(needles) * size / 4000 < 0.25 + (len(asked) + 1) * size / 4000


def test_a_key_with_several_values_gives_one_and_asks_for_the_others():
    found = document("needle-multivalue")
    assert all(len(question.expected) == 3 for question in found.questions)
    numbers = found.questions[0].expected
    assert task("needle-multivalue").score(found.questions[0], f" {numbers[2]} and {numbers[0]}") == pytest.approx(
        2 / 3
    )


def test_needles_lie_at_all_depths_between_sentences():
    needles = [f" N{letter}." for letter in "abcdefgh"]
    places = []
    for seed in range(20):
        ids = hide(PIECES.encode, TEXT, needles, 2000, seed)
        text = PIECES.decode(ids)
        assert len(ids) == 2000
        assert re.findall(r"(?<=\.) N([a-h])\.", text) == list("abcdefgh")
        places += [text.index(needle) / len(text) for needle in needles]
    counts = Counter(int(8 * place) for place in places)
    assert all(counts[part] >= 10 for part in range(8))  # 20 if parts were cut exactly


def test_documents_are_cut_from_different_places_and_a_short_text_starts_over():
    first, second = (PIECES.decode(hide(PIECES.encode, TEXT, [], 300, seed)) for seed in (0, 1))
    assert TEXT.startswith(first)
    assert second in TEXT * 2 and second not in first
    assert PIECES.decode(hide(PIECES.encode, "One. Two.", [], 9, seed=0)) == "One. Two.One. Two.One"
    assert PIECES.decode(hide(PIECES.encode, "One. Two.", [], 9, seed=1)) == "Two.One. Two.One. Two"


def test_sentences_end_before_a_capital():
    assert SENTENCE_END.split('It is 3.5 or so, e.g. here. "Yes!" He left.\nNow') == [
        "It is 3.5 or so, e.g. here.",
        ' "Yes!" He left.',
        "\nNow",
    ]


def test_the_vocabulary_are_short_words_that_come_back():
    text = "garden garden's x-ray " * 3 + "garden Oslo often often often rare unbelievable " + "unbelievable " * 3
    assert vocabulary(text) == ("garden", "often")


# -- the others


def test_key_values_ask_for_the_rest_of_a_value_in_the_object():
    found = document("kv-retrieval")
    prompt, asked = texts(found)
    for (question, answer), expected in zip(asked, (q.expected for q in found.questions), strict=True):
        key, given = re.fullmatch(r'Key: "([^"]*)"\nCorresponding value: "([0-9a-f]{8})', question).groups()
        assert prompt.count(f'"{key}": "{given}{answer}"') == 1
        assert "-" + "-".join(expected) == answer


def test_more_key_value_questions_than_pairs_are_refused():
    with pytest.raises(ValueError, match="fewer questions"):
        document("kv-retrieval", tokens=400, questions=9)


def test_variables_come_down_to_their_value():
    prompt, asked = texts(document("variable-tracking"))
    assigned = dict(re.findall(r" VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", prompt))
    assert len(assigned) == 3 * 5
    places = {name: prompt.index(f" VAR {name} =") for name in assigned}
    for question, answer in asked:
        chain = [re.findall(r"VAR (\w+) =$", question)[0], *re.findall(r"\w{5}", answer)]
        assert [assigned[name] for name in chain[:-1]] == chain[1:]
        assert chain[-1].isdigit()
        assert [places[name] for name in chain[:-1]] == sorted((places[name] for name in chain[:-1]), reverse=True)


@pytest.mark.parametrize("tokens", [400, 4000])
def test_the_common_words_are_the_most_common(tokens):
    found = document("common-words", tokens=tokens)
    prompt, asked = texts(found)
    counts = Counter(re.findall(r"\d+\. (\w+)", prompt))
    (*top, after) = (count for _, count in counts.most_common(11))
    assert min(top) >= 3 * after
    for (question, answer), expected in zip(asked, (q.expected for q in found.questions), strict=True):
        named = re.findall(r"\d+\. (\w+)", question + answer)
        assert set(named) == {word for word, _ in counts.most_common(10)}
        assert named[3:] == list(expected)


def test_reasoning_is_right_at_every_step_and_as_long_as_asked():
    found = replace(task("many-shot-arithmetic"), steps=100).document(PIECES.encode, 1000, 2, 0)
    prompt, asked = texts(found)
    shots = re.findall(r"Problem:(.*)\nSteps:(.*)\nAnswer: (\d+)\n\n", prompt)
    assert shots and PIECES.decode(found.prompt).endswith(f"Answer: {shots[-1][2]}\n\n")
    asked_parts = [re.fullmatch(r"Problem:(.*)\nSteps:(.*)\nAnswer: (\d+)", q + a).groups() for q, a in asked]
    for problem, reasoning, answer in [*shots, *asked_parts]:
        assert re.sub(r" = \d+", "", reasoning) == problem
        start, *steps = re.findall(r"[+-]? ?\d+(?: = \d+)?", reasoning)
        total = int(start)
        for step in steps:
            change, said = step.replace(" ", "").split("=")
            total += int(change)
            assert total == int(said)
        assert total == int(answer)
    assert [len(re.findall("=", reasoning)) for _, reasoning, _ in asked_parts] == [100, 100]
    assert len(found.questions[0].answer) > 800


def test_the_last_line_counts_and_only_the_first_of_them():
    question = Question([], [], ("12",), 9)
    score = task("many-shot-arithmetic").score
    assert score(question, " 5, word + 7 = 12\nAnswer: 12\n\nProblem: 4") == 1
    assert score(question, " 5, word + 7 = 12\nAnswer: 1") == 0
    assert score(question, " 5, word + 7 = 11\nAnswer: 11\n\nProblem: 12\nAnswer: 12") == 0


# -- real weights


@pytest.mark.slow
def test_documents_of_the_real_tokenizer_and_essays_have_the_asked_length():
    from transformers import AutoTokenizer

    from oasiskv.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for name, tokens in product(TASKS, (300, 4000, 128_000)):
        found = TASKS[name].document(encode, tokens, 2, 0)
        assert tokens - max(FILLED.get(name, 0), tokens // 50) <= len(found.prompt) <= tokens
        for question in found.questions:
            assert TASKS[name].score(question, tokenizer.decode(question.answer)) == 1
