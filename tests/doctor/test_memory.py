"""What fits in memory, on a machine and in a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from facts import ERROR, OK, WARNING, answering, failing

from oasiskv.core import container
from oasiskv.doctor import memory
from oasiskv.doctor.finding import GIB, MIB, Finding
from oasiskv.doctor.memory import Memory

NODE = Memory(total=32 * GIB, available=20 * GIB)


def kv_space(value: str | None, node: Memory = NODE) -> Finding:
    environment = {} if value is None else {"VLLM_CPU_KVCACHE_SPACE": value}
    return memory.kv_space(environment, node, machine_total=32 * GIB, utilization=0.92)


def test_little_memory_is_a_warning_and_the_containers_limit_counts() -> None:
    assert memory.machine(NODE, None).level is OK
    assert memory.machine(NODE, 8 * GIB).text.endswith("this container may use 8.0 GiB")
    assert memory.machine(NODE, 1 * GIB).level is WARNING
    assert memory.machine(Memory(32 * GIB, 1 * GIB), None).level is WARNING


def test_a_kv_pool_larger_than_memory_is_an_error() -> None:
    found = kv_space("21")
    assert found.level is ERROR
    assert "20.0 GiB are available" in found.text


def test_a_kv_pool_that_leaves_no_room_for_the_host_pool_is_a_warning() -> None:
    # 16 GiB for vLLM, min(4 x 16, 32 / 4) = 8 GiB for the host pool, 20 GiB there; 0.8 x 4 GiB are left for it.
    found = kv_space("16")
    assert found.level is WARNING
    assert "host pool up to 8.0 GiB" in found.text
    assert found.fix.startswith("--host-gib 3,")


def test_the_host_pool_is_reckoned_as_the_engine_does() -> None:
    from oasiskv.vllm_plugin import layout

    assert memory.HOST_POOLS == layout.HOST_POOLS


def test_pools_that_fit_are_ok() -> None:
    # 2 + 4 x 2 = 10 of 20 GiB.
    assert kv_space("2") == Finding(
        "memory", OK, "VLLM_CPU_KVCACHE_SPACE=2: KV pool 2.0 GiB, host pool up to 8.0 GiB, 20.0 GiB available"
    )


@pytest.mark.parametrize("value", ["0.5", "0", "-1", "4GB"])
def test_what_vllm_cannot_read_as_whole_gib_is_an_error(value: str) -> None:
    assert kv_space(value).level is ERROR


def test_without_a_size_of_the_kv_pool_there_is_a_warning_with_one_that_fits() -> None:
    # vLLM wants 0.92 x 32 = 29 GiB; 0.8 x 20 - 8 = 8 GiB leaves room for the host pool.
    found = kv_space(None)
    assert found.level is WARNING
    assert "refuses to start" in found.text
    assert found.fix.startswith("VLLM_CPU_KVCACHE_SPACE=8,")
    assert "refuses" not in kv_space("", Memory(32 * GIB, 31 * GIB)).text


def test_vllm_counts_with_the_memory_of_its_node() -> None:
    answers = answering("engine", node_total=16 * GIB, node_available=9 * GIB)
    assert memory.seen_by_vllm(answers, NODE) == Memory(16 * GIB, 9 * GIB)
    assert memory.seen_by_vllm(failing("engine", "refused"), NODE) == NODE


def test_shared_memory_must_hold_vllms_message_queue() -> None:
    assert memory.shared(GIB).level is OK
    assert memory.shared(64 * MIB).level is ERROR  # what Docker gives
    assert "--shm-size" in memory.shared(64 * MIB).fix
    assert memory.shared(None).level is ERROR


def test_a_full_or_read_only_cache_folder_is_a_warning() -> None:
    assert memory.disk("~/.cache", 10 * GIB, writable=True).level is OK
    assert memory.disk("~/.cache", 1 * GIB, writable=True).level is WARNING
    assert memory.disk("~/.cache", 10 * GIB, writable=False).level is WARNING


def test_pinned_memory_matters_only_with_a_gpu() -> None:
    assert memory.pinned(answering("copies", memory=1e10, threads=2)).text.endswith("not needed on a CPU")
    assert memory.pinned(answering("copies", pinned=True)).level is OK
    assert memory.pinned(answering("copies", pinned=False)).level is WARNING


# --- the container's limits


def machine_with(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_the_lowest_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    root = machine_with(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/pod/memory.max": "1000",
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/cpu.max": "max 100000",
            "sys/fs/cgroup/pod/box/cpu.max": "150000 100000",
        },
    )
    assert container.memory_limit(root) == container.usable_memory(root) == 1000
    assert container.cpu_quota(root) == 1.5


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    root = machine_with(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n2:memory:/box",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "2000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert container.memory_limit(root) == 2000
    assert container.cpu_quota(root) == 0.5


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert container.memory_limit(tmp_path) is None
    assert container.usable_memory(tmp_path) == psutil.virtual_memory().total
    assert container.cpu_quota(tmp_path) is None
