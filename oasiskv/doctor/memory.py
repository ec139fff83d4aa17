"""Memory: what there is, what vLLM and OasisKV will take of it; shared memory and disk. All sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oasiskv.doctor.finding import GIB, MIB, Finding, Level, gib
from oasiskv.doctor.fresh import Answers

TOPIC = "memory"
LITTLE = 2 * GIB
SHARED_MEMORY = 240 * MIB
"""The largest segment that vLLM's processes talk through (10 chunks of 24 MiB, ``shm_broadcast.MessageQueue``); vLLM
refuses to start with less."""
DISK = 2 * GIB
"""A small model while it is fetched and converted."""
HOST_POOLS, HOST_SHARE = 4, 4
"""``host_gib = auto``, as ``vllm_plugin.layout`` has it: four times the KV pool, at most a quarter of the memory."""


@dataclass(frozen=True)
class Memory:
    """Memory of the machine or of one of its nodes."""

    total: int
    available: int


def machine(memory: Memory, limit: int | None) -> Finding:
    """What there is; ``limit`` is the container's, if it has one."""
    text = f"{gib(memory.total)}, {gib(memory.available)} available"
    available = memory.available
    if limit is not None and limit < memory.total:
        text += f"; this container may use {gib(limit)}"
        available = min(available, limit)
    if available < LITTLE:
        fix = "end other programs, or give the container more: even a small model may not fit"
        return Finding(TOPIC, Level.WARNING, text, fix)
    return Finding(TOPIC, Level.OK, text)


def seen_by_vllm(answers: Answers, memory: Memory) -> Memory:
    """The memory that vLLM counts with: that of the node of its first core; the machine's where it did not say."""
    facts = answers.known("engine")
    if "node_total" not in facts:
        return memory
    return Memory(facts["node_total"], facts["node_available"])


def kv_space(environment: Mapping[str, str], node: Memory, machine_total: int, utilization: float) -> Finding:
    """Whether the KV pool, and OasisKV's host pool beside it, fit in memory on a CPU.

    Args:
        environment: for VLLM_CPU_KVCACHE_SPACE, GiB.
        node: the memory that vLLM counts with.
        machine_total: the machine's or container's memory that ``host_gib = auto`` counts with.
        utilization: the share of ``node.total`` that vLLM takes where no size is given.
    """
    value = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    most_host = machine_total // HOST_SHARE
    advice = max(1, int((node.available * 0.8 - most_host) / GIB))
    if not value:
        text = f"VLLM_CPU_KVCACHE_SPACE is not set: vLLM takes {utilization:.0%} of its memory node's {gib(node.total)}"
        if utilization * node.total > node.available:
            text += f" and refuses to start, because only {gib(node.available)} are available"
        else:
            text += ", and OasisKV's host pool comes on top"
        return Finding(TOPIC, Level.WARNING, text, f"VLLM_CPU_KVCACHE_SPACE={advice}, or less (GiB)")
    if not value.strip().isdecimal() or int(value) == 0:
        text = f"VLLM_CPU_KVCACHE_SPACE={value} is not allowed: vLLM takes whole GiB, 1 or more"
        return Finding(TOPIC, Level.ERROR, text, f"VLLM_CPU_KVCACHE_SPACE={advice}")
    pool = int(value) * GIB
    host = min(HOST_POOLS * pool, most_host)
    text = f"VLLM_CPU_KVCACHE_SPACE={value}: KV pool {gib(pool)}"
    if pool > node.available:
        text += f", but {gib(node.available)} are available: vLLM refuses to start"
        return Finding(TOPIC, Level.ERROR, text, f"VLLM_CPU_KVCACHE_SPACE={advice}, or end other programs")
    text += f", host pool up to {gib(host)}, {gib(node.available)} available"
    if pool + host > node.available:
        left = max(0, int((node.available - pool) * 0.8 / GIB))
        return Finding(TOPIC, Level.WARNING, text, f"--host-gib {left}, or a smaller VLLM_CPU_KVCACHE_SPACE")
    return Finding(TOPIC, Level.OK, text)


def shared(free: int | None) -> Finding:
    """Whether vLLM's processes can talk to each other; ``free`` of /dev/shm, None if there is none."""
    fix = "docker run --shm-size=1g (more with tensor parallelism), or --ipc=host"
    if free is None:
        return Finding(TOPIC, Level.ERROR, "no /dev/shm: vLLM's processes talk to each other through it", fix)
    text = f"/dev/shm: {gib(free)} free"
    if free < SHARED_MEMORY:
        text += f", vLLM's processes need {gib(SHARED_MEMORY)} to talk to each other"
        return Finding(TOPIC, Level.ERROR, text, fix)
    return Finding(TOPIC, Level.OK, text)


def disk(folder: str, free: int, writable: bool) -> Finding:
    """Whether the cache folder, where fetched models go, has room."""
    fix = "XDG_CACHE_HOME=FOLDER, one that has room and can be written"
    if not writable:
        return Finding(TOPIC, Level.WARNING, f"{folder} cannot be written: no model can be fetched", fix)
    text = f"{folder}: {gib(free)} free on disk"
    return Finding(TOPIC, Level.OK, text) if free >= DISK else Finding(TOPIC, Level.WARNING, text, fix)


def pinned(answers: Answers) -> Finding:
    """Whether host memory can be pinned, which copies to a GPU need. Not yet run on a GPU."""
    facts = answers["copies"]
    if "pinned" not in facts:
        return Finding(TOPIC, Level.OK, "pinned memory: not needed on a CPU")
    if not facts["pinned"]:
        fix = "run outside WSL or a restricted container"
        return Finding(TOPIC, Level.WARNING, "pinned memory: torch cannot pin any, copies will be slow", fix)
    return Finding(TOPIC, Level.OK, "pinned memory: works")
