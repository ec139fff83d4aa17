"""How long a decode step takes: a roofline of three phases, the pages that come in, and a constant.

    weights      max(bytes of the matrices that are read,   2 x active parameters x rows)
    attention    max(KV bytes of the context or the budget, 4 x heads x head_dim x tokens x layers x rows)
    scoring      bytes of the summaries that are read (coarse ones of all pages) / steps between two scorings
    link         pages x page bytes x layers x KV heads x requests
    overhead     scheduling, launches, sampling

Phases follow one another, so each has its own slower resource. Pages come in beside them, unless host and device share
memory. The cap is taken as what is fetched: an upper bound, measured turnover lies below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from oasiskv.core.capacity import Holding, SummaryBytes, Workload
from oasiskv.core.devices import Device
from oasiskv.core.geometry import Geometry
from oasiskv.core.link_budget import pages_per_step
from oasiskv.core.model_shape import ModelShape
from oasiskv.core.settings import Settings

MEMORY, ARITHMETIC = "memory", "arithmetic"


@dataclass(frozen=True)
class Phase:
    """One part of a step: its seconds, and the resource that binds it ("" for a constant)."""

    seconds: float
    bound_by: str = ""


@dataclass(frozen=True)
class Link:
    """Pages that come in per step and KV head, in bytes over all requests, beside what a step's time carries.

    ``carried_cap`` is the ``fetch_cap`` with which nothing waits: a share of the budget.
    """

    pages: int
    wanted_bytes: float
    carried_bytes: float
    carried_cap: float

    @property
    def stretches(self) -> bool:
        """Whether more is wanted than is carried: the step then lasts as long as the link."""
        return self.wanted_bytes > self.carried_bytes


@dataclass(frozen=True)
class Step:
    """One decode step of all running requests. ``limit``: the part that takes longest, with what binds it."""

    phases: dict[str, Phase]
    seconds: float
    limit: str
    link: Link | None = None


def dense_step(shape: ModelShape, device: Device, load: Workload, running: int) -> Step:
    """A step in which every request attends to its whole context."""
    return _step(device, _compute(shape, device, load, running, load.mean))


def oasis_step(
    shape: ModelShape,
    device: Device,
    load: Workload,
    settings: Settings,
    summary: SummaryBytes,
    held: Holding,
    running: int,
) -> Step:
    """A step of OasisKV, in the state that ``held`` says."""
    if held.state == "dense":
        return dense_step(shape, device, load, running)
    geometry = Geometry.of(settings, held.block_size)
    attended = min(load.mean, geometry.bound * held.block_size)
    phases = _compute(shape, device, load, running, attended)
    refine = settings.refined_pages(geometry.hot, geometry.block_size)
    each = summary.read(load.mean / held.block_size, refine)
    summaries = running * each * shape.layers * shape.kv_heads
    rate = device.attained * (device.summary_bandwidth or device.memory_bandwidth)
    phases["scoring"] = Phase(summaries / settings.steps_between_scores / rate, MEMORY)
    if held.state == "in_place":
        return _step(device, phases)
    return _step(device, phases, _link(shape, device, load, settings, geometry, running, _local(device, phases)))


def prefill_seconds(shape: ModelShape, device: Device, load: Workload) -> float:
    """Seconds of one prompt's prefill at ``load.mfu`` of the device's FLOP/s."""
    return shape.prefill_flops(load.prompt_tokens) / (load.mfu * device.flops)


def _compute(shape: ModelShape, device: Device, load: Workload, running: int, attended: float) -> dict[str, Phase]:
    rows = running * load.rows
    kv = running * (attended * shape.kv_bytes_per_token + shape.sliding_bytes(ceil(load.mean)))
    kv_rate = device.kv_bandwidth or device.memory_bandwidth
    flops = rows * shape.attention_flops(attended, load.mean)
    return {
        "weights": _roofline(device, shape.read_bytes(rows), device.memory_bandwidth, 2 * shape.active_params * rows),
        "attention": _roofline(device, kv, kv_rate, flops),
    }


def _roofline(device: Device, read_bytes: float, bandwidth: float, flops: float) -> Phase:
    memory, arithmetic = read_bytes / bandwidth, flops / device.flops
    slower = MEMORY if memory >= arithmetic else ARITHMETIC
    return Phase(max(memory, arithmetic) / device.attained, slower)


def _local(device: Device, phases: dict[str, Phase]) -> float:
    return device.overhead + sum(phase.seconds for phase in phases.values())


def _step(device: Device, phases: dict[str, Phase], link: Link | None = None) -> Step:
    seconds = _local(device, phases)
    slowest = max(phases, key=lambda part: phases[part].seconds)
    limit = f"{slowest} ({phases[slowest].bound_by})"
    if link is not None:
        copying = link.wanted_bytes / (device.link_bandwidth * device.attained)
        seconds = seconds + copying if device.shared_memory else max(seconds, copying)
        if copying > phases[slowest].seconds and (device.shared_memory or copying >= seconds):
            limit = "the link"
        phases = {**phases, "link": Phase(copying)}
    return Step({**phases, "overhead": Phase(device.overhead)}, seconds, limit, link)


def _link(
    shape: ModelShape,
    device: Device,
    load: Workload,
    settings: Settings,
    geometry: Geometry,
    running: int,
    step_seconds: float,
) -> Link:
    page, streams = shape.page_bytes(geometry.block_size), running * shape.layers * shape.kv_heads
    bandwidth = device.link_bandwidth * device.attained
    capped = pages_per_step(
        settings.fetch_cap,
        geometry,
        copy_bandwidth=bandwidth,
        step_seconds=step_seconds,
        page_bytes=page,
        streams=streams,
    )
    absent = geometry.middle(int(load.mean)) - geometry.hot
    pages = max(0, min(capped, absent))
    carried = bandwidth * step_seconds
    return Link(pages, pages * page * streams, carried, min(1.0, carried / (page * streams * geometry.bound)))
