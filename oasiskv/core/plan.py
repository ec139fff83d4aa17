"""A plan: stock vLLM and OasisKV on the same device under the same load, whether it pays, and a fleet of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from oasiskv.core.capacity import Holding, SummaryBytes, Workload, hold_dense, hold_oasis
from oasiskv.core.devices import GIB, Device
from oasiskv.core.model_shape import ModelShape
from oasiskv.core.settings import Settings, SettingsError
from oasiskv.core.step_time import Link, Step, dense_step, oasis_step, prefill_seconds

MARGIN = 0.1
"""A gain or loss below this is within the model's error."""
HOST_POOLS = 4
"""``host_gib=auto``: so many times the KV pool."""


@dataclass(frozen=True)
class Case:
    """Everything that a plan is made from.

    ``pool_bytes``: KV memory of the device. ``host_bytes``: a given host pool (None: what OasisKV takes by itself).
    ``summary``: bytes of one. ``stock_block``, ``oasis_block``: block sizes in tokens.
    """

    shape: ModelShape
    device: Device
    load: Workload
    settings: Settings
    summary: SummaryBytes
    pool_bytes: int
    stock_block: int
    oasis_block: int
    host_bytes: int | None = None

    @property
    def host_pool(self) -> int:
        """Bytes of the host pool; `auto` is four KV pools, and at most a quarter of the memory where it is known."""
        if self.host_bytes is not None:
            return self.host_bytes
        pool = HOST_POOLS * self.pool_bytes
        return min(pool, self.device.memory_bytes // 4) if self.device.shared_memory else pool


@dataclass(frozen=True)
class Side:
    """One way to serve the load.

    ``tokens_per_second`` counts output tokens in decode steps only; ``with_prefill`` if the same device also prefills
    every prompt. ``host_bytes``: host memory of all running requests.
    """

    holding: Holding
    running: int
    step: Step
    tokens_per_second: float
    with_prefill: float
    host_bytes: int


@dataclass(frozen=True)
class Plan:
    """Both sides. ``pooled`` is stock vLLM with the host memory added to its pool, where both are the same memory."""

    case: Case
    dense: Side
    oasis: Side
    pooled: Side | None
    prefill_seconds: float

    @property
    def ratio(self) -> float:
        """Decode throughput of OasisKV by that of stock vLLM."""
        return self.oasis.tokens_per_second / self.dense.tokens_per_second

    @property
    def pays(self) -> bool:
        """Whether OasisKV is faster, and no slower than stock vLLM given the same memory."""
        best = max(side.tokens_per_second for side in (self.dense, self.pooled) if side is not None)
        return self.oasis.tokens_per_second > best


@dataclass(frozen=True)
class Fleet:
    """Nodes that a rate of requests needs, with prompts prefilled on nodes of their own."""

    decode_dense: int
    decode_oasis: int
    prefill: int


def make_plan(case: Case) -> Plan:
    """Work out both sides.

    Raises:
        SettingsError: something does not fit; the message has the number that would.
    """
    held = hold_dense(case.shape, case.load, case.pool_bytes, case.stock_block)
    dense = _dense_side(case, held)
    oasis = _oasis_side(case)
    pooled = None
    if case.device.shared_memory and oasis.host_bytes:
        added = oasis.host_bytes if case.host_bytes is None else case.host_bytes
        pooled = _dense_side(case, hold_dense(case.shape, case.load, case.pool_bytes + added, case.stock_block))
    return Plan(case, dense, oasis, pooled, prefill_seconds(case.shape, case.device, case.load))


def make_fleet(case: Case, requests_per_second: float) -> Fleet:
    """Decode nodes filled with prompts that arrive prefilled, and the prefill nodes that send them.

    Raises:
        SettingsError: the rate is not positive, or as for :func:`make_plan`.
    """
    if requests_per_second <= 0:
        raise SettingsError(f"requests_per_second={requests_per_second:g} is not allowed: it must be above 0")
    plan = make_plan(replace(case, load=replace(case.load, prefill_here=False)))
    tokens = requests_per_second * case.load.output_tokens
    return Fleet(
        decode_dense=ceil(tokens / plan.dense.tokens_per_second),
        decode_oasis=ceil(tokens / plan.oasis.tokens_per_second),
        prefill=ceil(requests_per_second * plan.prefill_seconds),
    )


def _dense_side(case: Case, held: Holding) -> Side:
    running = held.running(case.load)
    return _side(case, held, running, dense_step(case.shape, case.device, case.load, running))


def _oasis_side(case: Case) -> Side:
    shape, load, settings = case.shape, case.load, case.settings
    sizes = (case.summary, case.pool_bytes, case.oasis_block, case.host_pool, case.device.shared_memory)
    held = hold_oasis(shape, load, settings, *sizes)
    running = held.running(load)
    return _side(case, held, running, oasis_step(shape, case.device, load, settings, case.summary, held, running))


def _side(case: Case, held: Holding, running: int, step: Step) -> Side:
    load = case.load
    decode = running * load.tokens_per_step / step.seconds
    busy = load.output_tokens / decode + prefill_seconds(case.shape, case.device, load)
    return Side(held, running, step, decode, load.output_tokens / busy, running * held.host_bytes_each)


def reasons(plan: Plan) -> list[str]:
    """Why it pays or does not, in sentences; the verdict first."""
    dense, oasis = plan.dense, plan.oasis
    said = [_verdict(plan)]
    if oasis.holding.state == "dense":
        return [*said, "Requests stay dense (within the budget, or with memory to spare): nothing is gained."]
    if oasis.holding.state == "in_place":
        said.append(
            "Nothing leaves the device (all fit, or the host pool holds fewer): each reads its budget in place."
        )
    else:
        times = oasis.running / dense.running
        said.append(f"{oasis.running} requests at once instead of {dense.running} ({times:.1f} times as many).")
        if oasis.holding.fits_host == oasis.running < _on_device(plan):
            whole = _on_device(plan) * oasis.holding.host_bytes_each / GIB
            pool = plan.case.host_pool / GIB
            said.append(f"The host pool of {pool:,.1f} GiB holds no more; with --host-gib {whole:,.0f} all would fit.")
    said.append(f"A dense step is bound by {dense.step.limit}, one of OasisKV by {oasis.step.limit}.")
    if oasis.step.link is not None:
        said.append(_link_sentence(oasis.step.link))
    if plan.pooled is not None:
        said.append(
            f"Host and device share memory here: with the host pool added to its KV pool, stock vLLM "
            f"would run {plan.pooled.running} at once and decode {plan.pooled.tokens_per_second:,.1f} tokens/s."
        )
    return said


def _on_device(plan: Plan) -> int:
    """Requests that would run at once with a host pool without end."""
    return replace(plan.oasis.holding, fits_host=None).running(plan.case.load)


def _verdict(plan: Plan) -> str:
    found = f"predicted decode throughput is {plan.ratio:.2f} times stock vLLM's"
    if plan.pays:
        return f"It pays: {found}."
    if plan.ratio > 1:
        return f"It does not pay here: {found}, but stock vLLM given the same memory is as fast or faster."
    near = " (within the model's error)" if plan.ratio > 1 - MARGIN else ""
    return f"It does not pay: {found}{near}."


def _link_sentence(link: Link) -> str:
    if not link.stretches:
        return f"The link carries what is wanted, up to --fetch-cap {link.carried_cap:.3g}."
    one_page = link.wanted_bytes / link.pages
    way_out = f"--fetch-cap {link.carried_cap:.2g} is what it carries"
    if one_page > link.carried_bytes:
        way_out = "Not even one page per KV head and step is carried: run fewer requests at once"
    return (
        f"The link is short: {link.wanted_bytes / 1e6:,.0f} MB wanted per step, {link.carried_bytes / 1e6:,.0f} MB "
        f"carried: the step waits for it. {way_out}."
    )
