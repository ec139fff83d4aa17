"""The command line of ``oasiskv plan``, and the :class:`Case` that it describes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oasiskv.cli.options import UsageError, did_you_mean, split
from oasiskv.core.capacity import SummaryBytes, Workload, check_context
from oasiskv.core.devices import GB, GIB, PRESETS, TERA, Device, preset
from oasiskv.core.geometry import Geometry
from oasiskv.core.model_shape import ModelShape, read_shape
from oasiskv.core.plan import Case, make_plan
from oasiskv.core.settings import Settings, SettingsError

if TYPE_CHECKING:
    from oasiskv.core.scorers import Scorer

HERE = "here"
DEFAULT_OUTPUT, LONGEST_DEFAULT_PROMPT = 512, 16384
NUMBERS = ("memory_gib", "bandwidth_gbs", "tflops", "link_gbs")
"""A device in numbers: all four stand for one without a name."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parser() -> argparse.ArgumentParser:
    """The options that are not settings."""
    p = _Parser(add_help=False, allow_abbrev=False)
    names = ", ".join(PRESETS)
    p.add_argument("model", nargs="?", help="a folder, a config.json, smollm2, or a Hugging Face name (config only)")
    p.add_argument("--device", help=f"{HERE} (this machine, measured in 2 s; the default), or {names}")
    p.add_argument("--devices", type=int, default=1, help="so many of it, tensor parallel (1)")
    p.add_argument("--memory-gib", type=float, help="device memory")
    p.add_argument("--bandwidth-gbs", type=float, help="memory bandwidth, 10^9 bytes/s")
    p.add_argument("--tflops", type=float, help="dense bfloat16 arithmetic, 10^12 FLOP/s")
    p.add_argument("--link-gbs", type=float, help="host to device, one direction, 10^9 bytes/s")
    p.add_argument("--overhead-ms", type=float, help="constant part of a step (2 on GPUs, 3 on CPUs)")
    p.add_argument("--attained", type=float, help="share of these rates that is reached (0.8; 1 where measured)")
    p.add_argument("--pool-gib", type=float, help="KV memory (what is left of 0.92 of the memory)")
    p.add_argument("--prompt", type=int, help="tokens of a prompt (16,384, or what the model's context leaves)")
    p.add_argument("--output", type=int, default=DEFAULT_OUTPUT, help=f"tokens of an answer ({DEFAULT_OUTPUT})")
    p.add_argument("--concurrency", type=int, help="most requests at once (as many as fit)")
    places = ("here", "elsewhere")
    p.add_argument("--prefill", choices=places, default="here", help="where prompts are prefilled (here)")
    p.add_argument("--draft-tokens", type=int, default=0, help="draft tokens verified in each step (0)")
    p.add_argument("--acceptance", type=float, default=0.7, help="probability that a draft token is accepted (0.7)")
    p.add_argument("--weight-bits", type=float, help="bits of one weight (what the configuration says, else 16)")
    p.add_argument("--kv-bytes", type=int, choices=(1, 2, 4), default=2, help="bytes of one KV number (2; 1 is fp8)")
    p.add_argument("--block-size", type=int, help="OasisKV's tokens per block (16 on GPUs, 32 on CPUs)")
    p.add_argument("--mfu", type=float, default=0.5, help="share of the arithmetic that prefill reaches (0.5)")
    p.add_argument("--requests-per-second", type=float, help="plan a fleet for this rate")
    p.add_argument("--check", type=Path, metavar="JSON", help="put predictions beside what `oasiskv bench` measured")
    p.add_argument("--json", type=Path, help="write all numbers to this file")
    return p


@dataclass(frozen=True)
class Request:
    """A checked command line."""

    args: argparse.Namespace
    settings: dict[str, str]
    """Settings that were given."""


def parse(arguments: Sequence[str]) -> Request:
    """Check the command line, as far as that needs no model.

    Raises:
        SettingsError, UsageError: something is wrong with it.
    """
    given, rest = split(arguments)
    Settings.parse(given)
    args, unknown = parser().parse_known_args(rest)
    if unknown:
        hint = did_you_mean(unknown) or "`oasiskv plan --help` shows all options"
        raise UsageError(f"unknown option {unknown[0]}: {hint}")
    if args.model is None and args.check is None:
        raise UsageError("the model must come first: oasiskv plan MODEL [options]")
    positive = (*NUMBERS, "devices", "pool_gib", "weight_bits", "block_size", "requests_per_second")
    for name in positive:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value:g} is not allowed: it must be above 0")
    if args.device and args.device.lower() != HERE:
        preset(args.device)
    return Request(args, given)


def load_shape(name: str, args: argparse.Namespace) -> ModelShape:
    """The model's shape, over all devices.

    Raises:
        SettingsError, UsageError, FetchError: it is not found, or not one that can be planned.
    """
    from oasiskv.cli.model_config import load_config

    config = load_config(name)
    shape = read_shape(name, config, weight_bits=args.weight_bits, kv_item_bytes=args.kv_bytes)
    return shape.split(args.devices)


def load_of(args: argparse.Namespace, shape: ModelShape) -> Workload:
    """The load that the command line describes."""
    prompt = args.prompt
    if prompt is None:
        prompt = max(1, min(LONGEST_DEFAULT_PROMPT, shape.max_context - args.output))
    return Workload(
        prompt_tokens=prompt,
        output_tokens=args.output,
        concurrency=args.concurrency,
        draft_tokens=args.draft_tokens,
        acceptance=args.acceptance,
        prefill_here=args.prefill == "here",
        mfu=args.mfu,
    )


def make_scorer_for(shape: ModelShape, settings: Settings) -> Scorer:
    """The scorer that the settings mean for this model.

    Raises:
        SettingsError: it cannot summarise this model's keys.
    """
    import torch  # takes seconds: what is wrong with the command line is said before

    from oasiskv.core.scorers import make_scorer

    dtype = shape.summary_dtype if settings.summary_dtype == "auto" else settings.summary_dtype
    try:
        return make_scorer(settings.scorer, shape.head_dim, getattr(torch, dtype))
    except ValueError as error:
        raise SettingsError(f"scorer={settings.scorer} cannot be used with {shape.name}: {error}") from None


def device_of(args: argparse.Namespace, measured: Device | None = None) -> Device:
    """The device that the command line describes: ``measured`` for `here`, without it with a preset's rates."""
    numbers = [getattr(args, name) for name in NUMBERS]
    if args.device is None and all(number is not None for number in numbers):
        base = Device("device in numbers", 0, 0.0, 0.0, 0.0, overhead=PRESETS["h100"].overhead, source="given")
    elif is_here(args):
        from oasiskv.core.probe_machine import unmeasured

        base = measured or unmeasured()
    else:
        base = preset(args.device)
    memory, bandwidth, tflops, link = numbers
    return base.with_numbers(
        memory_bytes=None if memory is None else int(memory * GIB),
        memory_bandwidth=None if bandwidth is None else bandwidth * GB,
        flops=None if tflops is None else tflops * TERA,
        link_bandwidth=None if link is None else link * GB,
        overhead=None if args.overhead_ms is None else args.overhead_ms / 1e3,
        attained=args.attained,
    ).times(args.devices)


def is_here(args: argparse.Namespace) -> bool:
    """Whether this machine is to be measured."""
    named = args.device is not None and args.device.lower() == HERE
    return named or (args.device is None and any(getattr(args, name) is None for name in NUMBERS))


def measured_device(args: argparse.Namespace, shape: ModelShape, scorer: Scorer) -> Device:
    """The device that the command line describes; this machine is measured, in two seconds."""
    if not is_here(args):
        return device_of(args)
    from oasiskv.core.probe_machine import measure

    return device_of(args, measure(scorer, max(1, shape.heads // shape.kv_heads)))


def case_of(
    args: argparse.Namespace,
    shape: ModelShape,
    load: Workload,
    settings: Settings,
    device: Device,
    summary: SummaryBytes,
) -> Case:
    """Everything put together.

    Raises:
        SettingsError: the weights leave no KV memory.
    """
    pool = device.pool_bytes(shape.held_bytes) if args.pool_gib is None else int(args.pool_gib * GIB)
    if pool <= 0:
        raise SettingsError(
            f"the weights of {shape.name} ({shape.held_bytes / GIB:.1f} GiB) leave no KV memory of the "
            f"{device.memory_bytes / GIB:.1f} GiB of {device.name}; use more --devices, a larger one, or --weight-bits"
        )
    host = None if settings.host_gib == "auto" else int(settings.host_gib * GIB)
    return Case(
        shape=shape,
        device=device,
        load=load,
        settings=settings,
        summary=summary,
        pool_bytes=pool,
        stock_block=device.stock_block,
        oasis_block=args.block_size or device.oasis_block,
        host_bytes=host,
    )


def measured_case(args: argparse.Namespace, shape: ModelShape, load: Workload, settings: Settings) -> Case:
    """The case; what does not fit is refused before this machine is measured.

    Raises:
        SettingsError: something does not fit.
    """
    check_context(shape, load)
    block_size = args.block_size or device_of(args).oasis_block
    Geometry.of(settings, block_size)
    scorer = make_scorer_for(shape, settings)
    summary = SummaryBytes.of(scorer, block_size)
    case = case_of(args, shape, load, settings, device_of(args), summary)
    make_plan(case)
    return replace(case, device=measured_device(args, shape, scorer)) if is_here(args) else case
