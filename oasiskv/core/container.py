"""What the control groups (a container's limits) allow this process: memory in bytes, CPUs as a number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

UNLIMITED = 1 << 62
"""Version 1 says "no limit" with a number near 2^63."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """The lowest memory limit in bytes; None without one. ``root`` is where /proc and /sys lie."""
    texts = [*_read(root, "", "memory.max"), *_read(root, "memory", "memory.limit_in_bytes")]
    return min((int(text) for text in texts if text != "max" and int(text) < UNLIMITED), default=None)


def usable_memory(root: Path = Path("/")) -> int:
    """The machine's memory in bytes, or what the container may use of it."""
    total, limit = psutil.virtual_memory().total, memory_limit(root)
    return total if limit is None else min(total, limit)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The lowest quota in CPUs, such as 1.5; None without one."""
    pairs = [text.split() for text in _read(root, "", "cpu.max")]
    quotas, periods = _read(root, "cpu", "cpu.cfs_quota_us"), _read(root, "cpu", "cpu.cfs_period_us")
    pairs += [list(pair) for pair in zip(quotas, periods, strict=True)]
    return min((int(quota) / int(period) for quota, period in pairs if quota not in ("max", "-1")), default=None)


def _read(root: Path, controller: str, file: str) -> list[str]:
    """The contents of ``file`` in our group and those above it; ``controller`` is empty for version 2."""
    return [(folder / file).read_text().strip() for folder in _folders(root, controller) if (folder / file).is_file()]


def _folders(root: Path, controller: str) -> Iterator[Path]:
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        below = mount / path.strip("/")
        yield from (folder for folder in (below, *below.parents) if folder.is_relative_to(mount))
