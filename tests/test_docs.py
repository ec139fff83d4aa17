"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from oasiskv.core.settings import Settings

DOCS = Path(__file__).parent.parent / "docs"


def test_every_setting_stands_in_the_table_with_its_default_and_meaning() -> None:
    text = (DOCS / "settings.md").read_text()
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` | `{default}` |")]
        assert row.endswith(f"| {field.description} |")


def test_every_metric_is_documented() -> None:
    from oasiskv.vllm_plugin.metrics import COUNTERS, GAUGES

    text = (DOCS / "settings.md").read_text()
    for kind, metrics in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, meaning in metrics.items():
            assert f"| `{name}` | {kind} | {meaning} |" in text


def test_every_module_is_on_the_map() -> None:
    text = (DOCS / "structure.md").read_text()
    package = DOCS.parent / "oasiskv"
    named = {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line[:60])}
    for folder in ("core", "tiers", "vllm_plugin", "report", "bench", "eval"):
        for module in (package / folder).glob("*.py"):
            assert module.stem in {*named, "__init__"}, f"{folder}/{module.name} is not in docs/structure.md"


def test_every_test_that_catches_a_fault_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (DOCS / "faults.md").read_text())
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (DOCS.parent / "tests" / file).read_text(), f"{file}::{test}"
