"""``python -m oasiskv.eval.retrieval``: what is the scorer worth on key-value retrieval with real weights?

Prints one table: for each scorer the softmax mass that the chosen blocks hold, and what leaving out the rest does to
the text's likelihood, against dense attention on the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from oasiskv.core.geometry import Geometry
from oasiskv.core.scorers import SCORERS
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.eval.coverage import CoverageStudy, Measures, Policy, prefill, run
from oasiskv.eval.texts import RetrievalText, key_value_text
from oasiskv.models import resolve_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
COLUMNS = (
    "scorer",
    "mass held %",
    "of the middle %",
    "ΔNLL answers",
    "ΔNLL all",
    "KL to dense",
    "top-1 = dense %",
    "pages in",
)
NOTES = (
    "mass held: dense's softmax mass on what the scorer would hold (dense's queries choose); of the middle: the part "
    "held of the mass between sinks and window. NLL: nats per token less dense's, on the answers (which can be looked "
    "up) and on all tokens; KL: nats per token; ± standard error over tokens. pages in: pages brought in per layer, "
    "KV head and step."
)


@dataclass(frozen=True)
class Outcome:
    """The measures of all texts, one after the other."""

    policies: list[str]
    measures: Measures
    is_value: torch.Tensor
    """bool ``[steps]``: the token that the step predicts belongs to an answer."""


def study_texts(
    model: Any,
    texts: Sequence[RetrievalText],
    policies: Sequence[Policy],
    settings: Settings,
    block_size: int,
    progress: Progress,
) -> Outcome:
    """Run every text through all policies."""
    found: list[Measures] = []
    is_value: list[bool] = []
    for number, text in enumerate(texts, 1):
        steps = len(text.continuation) - 1
        task = progress.add_task(f"text {number} of {len(texts)}: prefill of {len(text.prompt)} tokens", total=steps)
        start = prefill(model, text.prompt)
        study = CoverageStudy(start, policies, settings, block_size, steps)
        progress.update(task, description=f"text {number} of {len(texts)}: teacher-forced decode")
        found.append(run(model, study, text.continuation, on_step=lambda task=task: progress.advance(task)))
        is_value += text.is_value[1:]
    joined = Measures(**{f.name: torch.cat([getattr(m, f.name) for m in found]) for f in fields(Measures)})
    return Outcome(["dense", *map(label, policies)], joined, torch.tensor(is_value))


def rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """The table's rows, one per policy, dense first; in the order of ``COLUMNS``."""
    m, value = outcome.measures, outcome.is_value
    table: list[tuple[str, ...]] = []
    for i, name in enumerate(outcome.policies):
        delta = m.nll[:, i] - m.nll[:, 0]
        if i == 0:
            likelihood = (f"{m.nll[value, 0].mean():.3f} (NLL)", f"{m.nll[:, 0].mean():.3f} (NLL)", "0")
        else:
            likelihood = (mean_and_error(delta[value]), mean_and_error(delta), mean_and_error(m.kl[:, i]))
        table.append(
            (
                name,
                f"{100 * m.mass[:, i].mean():.1f}",
                f"{100 * (1 - (1 - m.mass[:, i].mean()) / m.middle.mean()):.1f}",
                *likelihood,
                f"{100 * m.same_top[:, i].float().mean():.0f}",
                f"{m.pages_in[:, i].mean():.1f}",
            )
        )
    return table


def label(policy: Policy) -> str:
    """``box`` for summaries in bfloat16, else ``box:int8``."""
    name = next(name for name, dtype in DTYPES.items() if dtype is policy.dtype)
    return policy.scorer if name == "bfloat16" else f"{policy.scorer}:{name}"


def parse_policy(text: str) -> Policy:
    """``box`` or ``box:int8``."""
    name, _, dtype = text.partition(":")
    if name not in SCORERS or (dtype or "bfloat16") not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: a scorer ({', '.join(SCORERS)}), perhaps with :{' or :'.join(DTYPES)}"
        )
    return Policy(name, DTYPES[dtype or "bfloat16"])


def mean_and_error(values: torch.Tensor) -> str:
    """``+0.123 ± 0.045``: mean and its standard error over tokens."""
    if len(values) < 2:
        return "n/a"
    error = values.std() / len(values) ** 0.5
    return f"{values.mean():+.3f} ± {error:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study that the command line asks for, and print its table (Markdown with ``--markdown``)."""
    args = parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        settings = Settings.parse(
            {
                "budget_tokens": args.budget,
                "fetch_cap": args.cap,
                "predictor": args.predictor,
                "group_merge": args.merge,
                "granularity": args.granularity,
            }
        )
        Geometry.of(settings, args.block_size)
    except SettingsError as error:
        console.print(f"[red]{error}")
        return 2
    model, tokenizer = load(resolve_model(args.model), DTYPES[args.dtype])
    texts = [
        key_value_text(tokenizer, args.tokens, args.steps + 1, seed)
        for seed in range(args.seed, args.seed + args.texts)
    ]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        outcome = study_texts(model, texts, args.scorers, settings, args.block_size, progress)
    answers = int(outcome.is_value.sum())
    title = (
        f"{args.model}, key-value retrieval, {len(texts)} x {len(texts[0].prompt)} tokens, budget {args.budget}: "
        f"{len(outcome.is_value)} tokens teacher-forced, {answers} of them in answers"
    )
    if args.markdown:
        print(markdown(outcome))
    else:
        table = Table(*COLUMNS, title=title, caption=NOTES, caption_justify="left")
        for row in rows(outcome):
            table.add_row(*row)
        Console().print(table)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m oasiskv.eval.retrieval",
        description=__doc__.split("\n\n", 1)[1] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    found.add_argument("--model", default="smollm2", help="name or folder of a model")
    found.add_argument("--tokens", type=int, default=6000, help="tokens of the prompt")
    found.add_argument("--steps", type=int, default=120, help="tokens that follow it in each text")
    found.add_argument("--texts", type=int, default=2, help="texts, with seeds that follow one another")
    found.add_argument("--seed", type=int, default=0, help="seed of the first text")
    found.add_argument("--budget", type=int, default=1024, help="as the setting budget_tokens")
    found.add_argument("--block-size", type=int, default=32, help="tokens in a block")
    found.add_argument("--cap", type=float, default=Settings().fetch_cap, help="as the setting fetch_cap")
    for name, setting in (("predictor", "predictor"), ("merge", "group_merge"), ("granularity", "granularity")):
        found.add_argument(f"--{name}", default=getattr(Settings(), setting), help=f"as the setting {setting}")
    found.add_argument(
        "--scorers", type=parse_policy, nargs="+", metavar="SCORER",
        default=[Policy(name) for name in ("random", "minmax", "mean", "box", "q2", "oracle")],
        help="scorers to compare; a format other than bfloat16 for the summaries is given as in box:int8",
    )  # fmt: skip
    found.add_argument("--dtype", choices=DTYPES, default="float32", help="number format of the model")
    found.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return found


def load(model: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A Hugging Face model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval(), AutoTokenizer.from_pretrained(model)


def markdown(outcome: Outcome) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(outcome)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
