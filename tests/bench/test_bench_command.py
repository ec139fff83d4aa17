"""The command line of `oasiskv bench`: what is refused before anything starts, and what is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasiskv.bench.cells import BenchError
from oasiskv.cli.bench import parse
from oasiskv.cli.options import UsageError
from oasiskv.core.settings import SettingsError
from oasiskv.report.page import PageError


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["chess"], UsageError, "no workload 'chess'; allowed are long-context"),
        (["--enforce-eager", "decode"], UsageError, "decode comes too late"),
        (["--rounds", "0"], UsageError, "--rounds 0 is not allowed"),
        (["multi-turn", "--turns", "-1"], UsageError, "--turns -1 is not allowed"),
        (["--pool-requests", "nan"], UsageError, "--pool-requests nan is not allowed"),
        (["--rows", "best"], UsageError, "--rows best is not allowed: dense_plus_host, limit"),
        (["--block-size", "16"], UsageError, "--block-size is set by the benchmark"),
        (["--budgets", "512", "--budget-tokens", "512"], UsageError, "give one of them"),
        (["--host-gib", "1"], UsageError, "--host-gib is set by the benchmark"),
        (["--prompt", "500", "--output", "1"], BenchError, "--output 1 is not allowed"),
        (["--prompt", "5000"], BenchError, "tokens, .* has 4,096"),
        (["--budget-tokens", "32"], SettingsError, "leaves no room for hot slots"),
        (["--scorer", "best"], SettingsError, "scorer='best' is not allowed"),
        (["--prompt", "500", "--output", "20", "--html", "/"], PageError, "/ cannot be written"),
    ],
)
def test_what_cannot_run_is_refused_with_one_line(
    arguments: list[str], error: type[Exception], words: str, tiny_llama: Path
) -> None:
    names = [a for a in arguments[:1] if not a.startswith("-")]
    with pytest.raises(error, match=words):
        parse([*names, "--model", str(tiny_llama), *arguments[len(names) :]])


def test_a_setting_that_is_given_holds_even_where_it_is_the_default(tiny_llama: Path) -> None:
    request = parse(
        ["long-context", "--quick", "--model", str(tiny_llama), "--prompt", "900", "--output", "20", "--no-html",
         "--budget-tokens", "2048"]
    )  # fmt: skip
    assert request.cells[0].budget == 2048


def test_a_sweep_is_every_combination_in_one_pool(tiny_llama: Path) -> None:
    request = parse(
        ["decode", "--model", str(tiny_llama), "--prompt", "500,1000", "--output", "20", "--concurrency", "1,4",
         "--budgets", "256,512", "--no-html", "--enforce-eager"]
    )  # fmt: skip
    assert len(request.cells) == 8
    (pool,) = {cell.pool_bytes for cell in request.cells}
    assert pool == (3 * 8 + 1) * 128 * request.model.token_bytes  # 3 of 1,020 tokens, and vLLM's empty block
    assert {cell.options for cell in request.cells} == {("--enforce-eager",)}
