"""The key-value retrieval text: reproducible, of the asked length, and every answer stands in the prompt."""

import pytest

from oasiskv.eval.texts import key_value_text


def letters(text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


def spell(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_prompt_fills_the_length_with_whole_pairs():
    text = key_value_text(letters, tokens=1000, steps=300, seed=0)
    assert 1000 - 84 < len(text.prompt) <= 1000  # a pair takes 83 letters
    assert spell(text.prompt).endswith('"}\n\n')


def test_every_answer_stands_in_the_prompt_beside_its_key():
    text = key_value_text(letters, tokens=2000, steps=400, seed=3)
    continuation = spell(text.continuation)
    assert len(text.continuation) == len(text.is_value) == 400
    answer = "".join(letter for letter, value in zip(continuation, text.is_value, strict=True) if value)
    key = continuation.split('"')[1]
    assert f'"{key}": "{answer[:36]}"' in spell(text.prompt)


def test_the_seed_decides():
    one, two, other = (key_value_text(letters, 1000, 100, seed) for seed in (5, 5, 6))
    assert one == two and one.prompt != other.prompt


def test_too_short_a_prompt_is_refused():
    with pytest.raises(ValueError, match="tokens=100"):
        key_value_text(letters, 100, 10, 0)
