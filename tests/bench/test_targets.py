"""Targets: when one is met, how rounds are played and paired, and what the command shows of them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from test_cells import SOURCE, cell

from oasiskv.bench import target_report as report
from oasiskv.bench.cells import STOCK_BLOCK, BenchError, Cell, Model, context_for
from oasiskv.bench.engine_pool import EnginePool
from oasiskv.bench.figures import Figures, figures
from oasiskv.bench.job import DENSE, LIMIT, OASIS, Run
from oasiskv.bench.process import RunFailed
from oasiskv.bench.target_cases import CASES, QWEN, SMOLLM2
from oasiskv.bench.target_file import Earlier, read
from oasiskv.bench.targets import Case, CaseResult, Contender, Measured, Play, Target, play_round
from oasiskv.bench.workloads import WORKLOADS, conversations
from oasiskv.cli import bench_targets
from oasiskv.cli.bench_targets import NOTHING_EARLIER, Engines, chosen, measure
from oasiskv.cli.main import main
from oasiskv.cli.options import UsageError
from oasiskv.models import FetchError
from oasiskv.report.output import Output
from oasiskv.report.provenance import provenance

NOTHING = figures(Run(OASIS, 32, 100, 1.0, 0, (), ()))
CELL = cell(WORKLOADS["decode"])
QUIET = Console(quiet=True)


def contender(row: str, batch_of: str = "") -> Contender:
    return Contender(lambda model: CELL, row, batch_of)


FASTER = Target("throughput by dense", "throughput", at_least=1.5)
CLOSE = Target("step by the limit's", "beyond_ms", below=LIMIT, by="step_ms", at_most=1.15)
CASE = Case(
    "fast",
    "about it",
    "small",
    {DENSE: contender(DENSE), OASIS: contender(OASIS), LIMIT: contender(LIMIT, batch_of=OASIS)},
    (FASTER, CLOSE),
)


class Player:
    """Dense vLLM's throughput is 10, less in later rounds; OasisKV's is ``times`` that; its step is 1.1 of the limit's.

    ``error``: raised in the place of the run with the number ``at``.
    """

    def __init__(self, times: float = 2.0, batch: int = 7, error: BaseException | None = None, at: int = 0) -> None:
        self.times, self.batch, self.error, self.at = times, batch, error, at
        self.played: list[tuple[str, int]] = []

    def __call__(self, label: str, batch: int) -> Measured:
        if self.error is not None and len(self.played) == self.at:
            raise self.error
        self.played.append((label, batch))
        slower = [name for name, _ in self.played].count(label)
        dense = replace(NOTHING, throughput=10 / slower, step_ms=100.0 * slower)
        if label != OASIS:
            return Measured(dense)
        speed = self.times * dense.throughput
        ours = replace(dense, throughput=speed, beyond_ms=1.1 * dense.step_ms, beyond_batch=self.batch)
        return Measured(ours, {"bounded_requests": self.batch})

    @property
    def labels(self) -> list[str]:
        return [label for label, _ in self.played]


def played(rounds: int, player: Player, case: Case = CASE) -> CaseResult:
    return CaseResult(case, rounds=[play_round(case, number, player) for number in range(rounds)])


# -- judging


@pytest.mark.parametrize(
    ("bounds", "met", "missed"),
    [({"at_least": 1.5}, (1.5, 2.0), (1.499,)), ({"at_most": 1.15}, (1.15, 0.5), (1.151,))],
)
def test_a_target_is_met_at_its_bound_and_beyond(
    bounds: dict[str, float], met: tuple[float, ...], missed: tuple[float, ...]
) -> None:
    target = Target("a ratio", "throughput", **bounds)  # type: ignore[arg-type]
    assert all(target.is_met(ratio) for ratio in met)
    assert not any(target.is_met(ratio) for ratio in missed)


def test_a_target_has_one_bound() -> None:
    for bounds in ({}, {"at_least": 1.0, "at_most": 2.0}):
        with pytest.raises(ValueError, match="one of at_least and at_most"):
            Target("a ratio", "throughput", **bounds)


def test_the_median_is_judged() -> None:
    result = CaseResult(CASE)
    for times in (1.0, 1.6, 9.0):
        result.rounds.append(play_round(CASE, 0, Player(times)))
    faster, _ = result.verdicts
    assert faster.ratio is not None
    assert (faster.ratio.least, faster.ratio.median, faster.ratio.most) == pytest.approx((1.0, 1.6, 9.0))
    assert faster.word == "pass"
    result.rounds.append(play_round(CASE, 0, Player(1.0)))  # the median is 1.3 now
    assert result.verdicts[0].word == "falls short"


# -- rounds


def test_ratios_are_paired_by_rounds() -> None:
    """Each round is slower than the one before: unpaired, a ratio would be anything from 2/3 to 6."""
    faster, close = played(3, Player(2.0)).verdicts
    assert faster.ratio is not None and close.ratio is not None
    assert (faster.ratio.least, faster.ratio.most, faster.ratio.count) == (2.0, 2.0, 3)
    assert (close.ratio.least, close.ratio.most) == pytest.approx((1.1, 1.1))


def test_every_second_round_is_reversed_and_the_limit_follows_oasiskv() -> None:
    player = Player()
    played(3, player)
    assert player.labels == [DENSE, OASIS, LIMIT, OASIS, LIMIT, DENSE, DENSE, OASIS, LIMIT]


def test_the_limit_takes_oasiskvs_batch_of_the_same_round() -> None:
    player = Player(batch=7)
    played(1, player)
    assert player.played == [(DENSE, 0), (OASIS, 0), (LIMIT, 7)]


def test_without_a_batch_beyond_the_budget_there_is_no_limit_and_its_target_is_not_measured() -> None:
    player = Player(batch=0)
    result = played(2, player)
    assert LIMIT not in player.labels
    assert [verdict.word for verdict in result.verdicts] == ["pass", "not measured"]


# -- the cases


MODELS = {
    SMOLLM2: Model(SMOLLM2, "/smollm2", token_bytes=23_040, context=8_192, vocabulary=49_152),
    QWEN: Model(QWEN, "/qwen", token_bytes=12_288, context=32_768, vocabulary=151_936),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_case_can_run_and_its_targets_name_what_is_there(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=20 << 30))
    model = MODELS[case.model]
    for label, run in case.runs.items():
        sized = run.cell(model)
        sized.check(model)
        assert run.row != LIMIT or (sized.has_limit(model) and run.batch_of in case.runs), label
    for target in case.targets:
        assert {target.above, target.below} <= set(case.runs)
        assert all(name in Figures.__dataclass_fields__ for name in (target.figure, target.by or target.figure))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_all_runs_of_a_case_have_one_pool(case: Case) -> None:
    assert len({run.cell(MODELS[case.model]).pool_bytes for run in case.runs.values()}) == 1


@pytest.mark.parametrize(("name", "requests"), [("decode-16k", 4), ("reasoning", 2), ("scheduler", 70)])
def test_a_pool_holds_its_whole_requests_to_their_last_token(name: str, requests: int) -> None:
    model = MODELS[CASES[name].model]
    sized = CASES[name].runs[DENSE].cell(model)
    blocks = sized.pool_bytes // (STOCK_BLOCK * model.token_bytes)
    assert blocks == requests * context_for(sized.workload) // STOCK_BLOCK + 1  # vLLM keeps one of them empty


def test_drafts_differ_in_vllms_options_only_and_read_repetitions() -> None:
    case = CASES["ngram"]
    plain, drafts = (run.cell(MODELS[case.model]) for run in case.runs.values())
    assert replace(drafts, options=()) == plain
    assert json.loads(drafts.options[1])["method"] == "ngram"
    asked = conversations(plain.workload, plain.requests, case.cut(range(10_000), plain.requests))
    for conversation in asked:
        tokens = conversation.turns[0].tokens
        assert len(tokens) == 5_000 and tokens[64:] == tokens[:-64]
    assert len({conversation.turns[0].tokens[:64] for conversation in asked}) == 4


# -- the command


class Bench:
    """Starts cases without an engine."""

    def __init__(self, *players: Player, missing: str = "") -> None:
        self.players, self.missing = list(players), missing

    @contextmanager
    def __call__(self, case: Case) -> Iterator[tuple[Mapping[str, Cell], Play]]:
        if case.model == self.missing:
            raise FetchError("the index cannot be reached\nand more lines")
        yield dict.fromkeys(case.runs, CELL), self.players.pop(0)


MADE = replace(provenance(["oasiskv", "bench", "targets"]), commit="0123456789")


def measured(
    bench: Bench, cases: list[Case], path: Path, rounds: int = 2, earlier: Earlier = NOTHING_EARLIER
) -> tuple[list[CaseResult], str]:
    shown = io.StringIO()
    output, console = Output(None, path, False), Console(width=200, file=shown)
    results = measure(cases, rounds, bench, output, MADE, console, QUIET, earlier)
    return results, shown.getvalue()


def test_the_table_and_the_json_hold_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    results, shown = measured(Bench(Player(1.4)), [CASE], path)
    assert report.table(results).rows == (
        ("fast", "throughput by dense", "at least 1.5", "1.400", "1.400 to 1.400", "2", "falls short"),
        ("fast", "step by the limit's", "at most 1.15", "1.100", "1.100 to 1.100", "2", "pass"),
    )
    assert shown.count("falls short") == 1  # one case: one table
    assert "1 of 2 targets that were measured are met." in shown
    found: dict[str, Any] = json.loads(path.read_text())
    (case,) = found["cases"]
    assert found["kind"] == "targets" and found["made"]["command"] == "oasiskv bench targets"
    assert [target["passes"] for target in case["targets"]] == [False, True]
    assert case["targets"][0]["ratio"] == {"median": 1.4, "least": 1.4, "most": 1.4, "count": 2}
    assert [len(run["rounds"]) for run in case["runs"].values()] == [2, 2, 2]
    assert case["runs"][OASIS]["rounds"][0]["states"] == {"bounded_requests": 7}
    assert case["runs"][DENSE]["cell"]["pool_bytes"] == CELL.pool_bytes


def test_what_cannot_be_fetched_is_not_run_and_the_rest_is(tmp_path: Path) -> None:
    away = replace(CASE, name="away", model="gone")
    results, shown = measured(Bench(Player(), missing="gone"), [away, CASE], tmp_path / "targets.json")
    rows = report.table(results).rows
    assert [row[0] for row in rows if row[-1] == "not run"] == ["away", "away"]
    assert [row[-1] for row in rows if row[0] == "fast"] == ["pass", "pass"]
    assert "away: the index cannot be reached\n" in shown and "more lines" not in shown


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunFailed("oasis 2: its process ended\nits log")])
def test_an_end_before_its_time_keeps_all_finished_rounds_and_says_why(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    second = replace(CASE, name="second")
    bench = Bench(Player(), Player(error=error, at=4))  # in the middle of the second round
    with pytest.raises(type(error)):
        measured(bench, [CASE, second, replace(CASE, name="third")], path)
    found = json.loads(path.read_text())
    assert [case["case"] for case in found["cases"]] == ["fast", "second"]
    counts = [[target["ratio"]["count"] for target in case["targets"]] for case in found["cases"]]
    assert counts == [[2, 2], [1, 1]]
    why = "interrupted" if isinstance(error, KeyboardInterrupt) else "oasis 2: its process ended"
    assert found["cases"][1]["stopped"] == why
    assert found["findings"][-1].endswith(f"second after 1 round: {why}")


# -- several sittings

FAST, SECOND = CASE, replace(CASE, name="second")
BY_NAME = {case.name: case for case in (FAST, SECOND)}


def test_what_is_resumed_has_the_missing_rounds_played_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    broken = Bench(Player(2.0), Player(2.0, error=KeyboardInterrupt(), at=3))
    with pytest.raises(KeyboardInterrupt):
        measured(broken, [FAST, SECOND], path)
    first = json.loads(path.read_text())
    again = Player(3.0)
    measured(Bench(again), [SECOND], path, 3, read(path, BY_NAME, MADE))
    found = json.loads(path.read_text())
    assert found["cases"][0] == first["cases"][0]  # not asked for: as it was
    assert again.labels == [OASIS, LIMIT, DENSE, DENSE, OASIS, LIMIT]  # rounds 2 and 3: turned as without a break
    second = found["cases"][1]
    assert [len(run["rounds"]) for run in second["runs"].values()] == [3, 3, 3]
    assert second["targets"][0]["ratio"] == {"median": 3.0, "least": 2.0, "most": 3.0, "count": 3}
    assert second["stopped"] == "" and second["runs"][DENSE]["cell"] == CELL.as_dict() | {"options": []}
    assert [made["commit"] for made in found["earlier"]] == ["0123456789"]


def test_what_is_complete_is_not_started(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    measured(Bench(Player()), [FAST], path, 2)
    results, _ = measured(Bench(), [FAST], path, 2, read(path, BY_NAME, MADE))  # no player is left
    assert [len(result.rounds) for result in results] == [2]


def test_rounds_are_in_the_file_before_the_next_one_ends(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    counts = []

    class Watching(Player):
        def __call__(self, label: str, batch: int) -> Measured:
            counts.append(
                len(json.loads(path.read_text())["cases"][0]["runs"][DENSE]["rounds"]) if path.exists() else 0
            )
            return super().__call__(label, batch)

    measured(Bench(Watching()), [FAST], path, 2)
    assert counts == [0, 0, 0, 1, 1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["targets.json"]


def test_nothing_is_resumed_from_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json", BY_NAME, MADE) == Earlier()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not a file that this version"),
        ('{"kind": "bench"}', "its kind is 'bench'"),
        ('{"kind": "targets", "made": {}}', "KeyError: 'cases'"),
    ],
)
def test_what_is_no_file_of_targets_is_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    path.write_text(content)
    with pytest.raises(BenchError, match=words):
        read(path, BY_NAME, MADE)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"commit": "fedcba9876"}, "made with commit 0123456789, now it is fedcba9876"),
        ({"cores": MADE.cores + 1}, "made with cores"),
        ({"versions": {"vllm": "0.33"}}, "made with versions"),
    ],
)
def test_rounds_of_other_code_or_machines_are_not_put_together(now: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    measured(Bench(Player()), [FAST], path)
    with pytest.raises(BenchError, match=words):
        read(path, BY_NAME, replace(MADE, **now))


def test_rounds_of_another_dtype_are_not_put_together(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"

    @contextmanager
    def in_float32(case: Case) -> Iterator[tuple[Mapping[str, Cell], Play]]:
        yield dict.fromkeys(case.runs, CELL.with_dtype("float32")), Player()

    measure([FAST], 1, in_float32, Output(None, path, False), MADE, QUIET, QUIET)
    with pytest.raises(BenchError, match=r"with --dtype float32, now it is auto: .* give --dtype float32, or name"):
        read(path, BY_NAME, MADE)
    assert len(read(path, BY_NAME, MADE, "float32").results[0].rounds) == 1


def test_every_engine_and_the_size_of_the_pool_have_the_dtype_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=20 << 30))
    monkeypatch.setattr(bench_targets, "text_source", lambda model, cell, cut: SOURCE)
    asked = []

    def load(name: str, dtype: str) -> Model:
        asked.append(dtype)
        return MODELS[name]

    monkeypatch.setattr(bench_targets, "load_model", load)
    with Engines(QUIET, "float32")(CASES["ngram"]) as (cells, _):
        assert all(cell.options[-2:] == ("--dtype", "float32") for cell in cells.values())
    assert asked == ["float32"]


def test_rounds_of_changed_files_are_not_put_together(tmp_path: Path) -> None:
    path, changed = tmp_path / "targets.json", replace(MADE, commit="0123456789+")
    output = Output(None, path, False)
    measure([FAST], 1, Bench(Player()), output, changed, QUIET, QUIET)
    with pytest.raises(BenchError, match="files differ from the commit 0123456789"):
        read(path, BY_NAME, changed)


def test_a_model_that_cannot_be_fetched_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_model(name: str, dtype: str) -> Model:
        asked.append(name)
        raise FetchError("no network")

    monkeypatch.setattr(bench_targets, "load_model", no_model)
    engines = Engines(QUIET)
    for name in ("decode-16k", "decode-30k"):
        with pytest.raises(FetchError), engines(CASES[name]):
            pass
    assert asked == [QWEN]


def test_a_case_is_checked_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    monkeypatch.setattr(bench_targets, "load_model", lambda name, dtype: MODELS[name])
    with pytest.raises(BenchError, match="are more than the"), Engines(QUIET)(CASES["step-128k"]):
        pass


def test_each_run_asks_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=20 << 30))
    monkeypatch.setattr(bench_targets, "load_model", lambda name, dtype: MODELS[name])
    monkeypatch.setattr(bench_targets, "text_source", lambda model, cell, cut: SOURCE)
    jobs = []

    def no_engine(self: EnginePool, job: Any, title: str) -> Run:
        jobs.append((title, job.options[:1], job.settings["residency"]))
        return Run(OASIS, 32, 100, 1.0, 0, (), ())

    monkeypatch.setattr(EnginePool, "run", no_engine)
    with Engines(QUIET)(CASES["ngram"]) as (cells, play):
        play_round(CASES["ngram"], 1, play)
    assert list(cells) == ["no drafts", "n-gram drafts"]
    assert jobs == [("n-gram drafts 1", ("--speculative-config",), "bounded"), ("no drafts 1", (), "bounded")]


def test_only_takes_known_names_in_the_order_of_the_table() -> None:
    assert [case.name for case in chosen(["ngram", "one-7k"])] == ["one-7k", "ngram"]
    assert len(chosen(None)) == len(CASES)
    with pytest.raises(UsageError, match="no case 'one-8k'; allowed are long-context, decode-16k"):
        chosen(["one-7k", "one-8k"])
    with pytest.raises(UsageError, match="--only names nothing"):
        chosen([])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "--rounds 0 is not allowed"),
        (["--only", "chess"], "no case 'chess'"),
        (["--fast"], "--fast"),
        (["--dtype", "int8"], "int8"),
        (["--resume", "a.json", "--json", "b.json"], "the numbers go to the file of --resume"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["oasiskv", "bench", "targets", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_list_names_every_case_with_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    bench_targets.run(["--list"])
    shown = capsys.readouterr().out
    assert all(f"{name}: " in shown for name in CASES)
    assert shown.count("\n") == sum(1 + len(case.targets) for case in CASES.values())


def test_nothing_measured_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_targets, "Engines", lambda progress, dtype: Bench(missing=QWEN))
    monkeypatch.setattr(bench_targets, "check_vllm", lambda: None)
    with pytest.raises(SystemExit) as ended:
        bench_targets.run(["--only", "one-30k", "--no-html"])
    assert ended.value.code == 1
    assert "not run" in capsys.readouterr().out


def test_the_page_has_the_table_and_every_run(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    result = played(2, Player())
    result.cells = dict.fromkeys(CASE.runs, CELL.as_dict())
    Output(page, None, False).deliver(report.make([result]), MADE, QUIET)
    text = page.read_text()
    assert "throughput by dense" in text and "at least 1.5" in text and "dense vLLM" in text and "OasisKV" in text
