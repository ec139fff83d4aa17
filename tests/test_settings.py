"""Settings: checked once, and every refusal says value, what is allowed, and the fix."""

from __future__ import annotations

import pytest

from oasiskv import Settings, SettingsError, engine_args


def refusal(**values: object) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.parse(values)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    s = Settings()
    assert (s.residency, s.budget_tokens, s.sink_tokens, s.window_tokens, s.fetch_cap) == ("auto", 2048, 16, 64, 0.05)
    assert (s.scorer, s.granularity, s.predictor, s.miss_policy) == ("q2", "head", "both", "drop")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("budget_tokens", "512", 512),
        ("fetch_cap", "0.25", 0.25),
        ("fetch_cap", "auto", "auto"),
        ("host_gib", "1.5", 1.5),
        ("host_gib", "auto", "auto"),
        ("min_context_tokens", "0", 0),
        ("residency", "bounded", "bounded"),
    ],
)
def test_text_from_a_command_line_means_the_same_as_a_value(name: str, text: str, value: object) -> None:
    assert getattr(Settings.parse({name: text}), name) == value


@pytest.mark.parametrize(
    ("refine", "hot", "pages"),
    [("auto", 61, 128), ("auto", 13, 128), ("auto", 100, 200), ("all", 61, None), (2, 13, 26), (1.4, 10, 14)],
)
def test_codes_are_read_of_twice_the_hot_slots_and_of_4096_tokens_at_least(refine, hot: int, pages: int | None) -> None:
    assert Settings(refine=refine).refined_pages(hot, block_size=32) == pages


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(Exception, match="frozen"):
        Settings().budget_tokens = 1  # type: ignore[misc]


def test_changed_settings_build_the_same_object_again() -> None:
    s = Settings.parse({"budget_tokens": 1024, "scorer": "mean"})
    assert s.changed() == {"budget_tokens": 1024, "scorer": "mean"}
    assert Settings.parse(s.changed()) == s


def test_a_misspelt_setting_is_refused_with_the_right_name() -> None:
    assert "unknown setting budget_token=5; did you mean budget_tokens?" in refusal(budget_token=5)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    message = refusal(colour="red")
    assert "colour='red'" in message
    assert all(name in message for name in Settings.model_fields)


def test_a_wrong_choice_is_refused_with_the_allowed_ones() -> None:
    message = refusal(scorer="magic")
    assert "scorer='magic'" in message
    assert all(choice in message for choice in ("box", "minmax", "mean", "q2"))


@pytest.mark.parametrize(("name", "value"), [("budget_tokens", 0), ("fetch_cap", 1.5), ("host_gib", -1)])
def test_a_value_out_of_range_is_refused_with_the_value(name: str, value: float) -> None:
    assert f"{name}={value}" in refusal(**{name: value})


def test_a_budget_that_sinks_and_window_eat_up_is_refused_with_all_numbers() -> None:
    message = refusal(budget_tokens=80)
    assert "budget_tokens=80" in message
    assert "more than 80" in message
    assert "raise budget_tokens" in message
    assert Settings.parse({"budget_tokens": 81}).budget_tokens == 81


def test_every_wrong_setting_is_named_in_one_message() -> None:
    message = refusal(scorer="magic", granularity="token")
    assert "scorer='magic'" in message
    assert "granularity='token'" in message
    assert "\n" not in message


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_engine_args_carry_only_what_differs_from_the_defaults() -> None:
    assert engine_args(budget_tokens=1024) == {
        "kv_transfer_config": {
            "kv_connector": "OasisConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"budget_tokens": 1024},
        }
    }


def test_engine_args_check_at_once() -> None:
    with pytest.raises(SettingsError, match="budget_tokens=10 "):
        engine_args(budget_tokens=10)
