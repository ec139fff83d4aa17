"""What is said of cores and threads, of links and of optional packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts import ERROR, OK, WARNING, answering, failing, having

from oasiskv.doctor import cores, extras


def test_core_ids_are_written_as_vllm_takes_them() -> None:
    assert cores.spans([8, 0, 1, 2, 3]) == "0-3,8"


def test_a_quota_below_the_cores_is_a_warning() -> None:
    assert cores.count(8, 16, range(8), quota=None).level is OK
    assert cores.count(8, 16, range(8), quota=8.0).level is OK
    found = cores.count(8, 16, range(8), quota=2.5)
    assert found.level is WARNING
    assert "VLLM_CPU_OMP_THREADS_BIND=0-1" in found.fix


def test_threads_say_what_decides_about_them() -> None:
    bound = answering("threads", threads=6, cores=range(6), reserved=[6, 7])
    text = cores.threads(bound, {"OMP_NUM_THREADS": "4"}).text
    assert "6 threads to cores 0-5 (VLLM_CPU_OMP_THREADS_BIND=auto), leaves 6-7 alone" in text
    assert "OMP_NUM_THREADS=4 has no effect" in text
    free = answering("threads", threads=4, cores=[], reserved=[])
    assert "starts 4 (OMP_NUM_THREADS=4)" in cores.threads(free, {"OMP_NUM_THREADS": "4"}).text


def test_no_free_core_is_a_warning_where_there_are_enough() -> None:
    none_free, one_free = answering("threads", free_core=False), answering("threads", free_core=True)
    assert "async" in cores.pipeline(one_free, 8).text
    found = cores.pipeline(none_free, 32)
    assert found.level is WARNING
    assert "inline" in found.text
    assert "OMP_NUM_THREADS=31" in found.fix
    assert cores.pipeline(none_free, 8).level is OK


def test_kernels_that_do_not_run_are_an_error() -> None:
    facts = {"isa": 2, "numba": "0.65.0", "chosen": "default"}
    assert cores.kernels(answering("kernels", **facts, layers=["omp"])).level is OK
    assert cores.kernels(answering("kernels", **facts, layers=[])).level is WARNING
    missing = cores.kernels(answering("kernels", **{**facts, "isa": -1}, layers=["omp"]))
    assert missing.level is WARNING
    assert "g++" in missing.fix
    found = cores.kernels(failing("kernels", "RuntimeError: the compiled kernels are wrong"))
    assert found.level is ERROR
    assert "reinstall" in found.fix


def test_what_vllm_would_like_preloaded_is_only_a_hint() -> None:
    found = cores.preloaded(answering("threads", preloaded="/lib/libgomp.so.1"), x86=True)
    assert found.level is OK
    assert "libtcmalloc" in found.text and "libiomp" in found.text
    both = answering("threads", preloaded="/lib/libtcmalloc_minimal.so.4:/lib/libiomp5.so")
    assert cores.preloaded(both, x86=True).text == "LD_PRELOAD has libtcmalloc, libiomp"
    assert "libiomp" not in cores.preloaded(answering("threads", preloaded=""), x86=False).text


def test_variables_that_change_the_runner_are_shown() -> None:
    assert cores.runner({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).text.startswith("VLLM_ENABLE_V1_MULTIPROCESSING=0 (")
    assert cores.runner({}).text.startswith("not set: ")
    assert cores.runner({"VLLM_USE_V2_MODEL_RUNNER": "0"}).level is OK
    assert cores.runner({"VLLM_USE_V2_MODEL_RUNNER": "1"}).level is WARNING


def test_the_mode_of_huge_pages_is_the_one_in_brackets(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert cores.huge_pages(tmp_path / "enabled").text.endswith(": madvise")
    assert cores.huge_pages(tmp_path / "missing").text.endswith(": not known")


# --- links and optional packages


def test_links_are_those_of_the_device() -> None:
    assert extras.link(answering("copies", memory=7.34e9, threads=1)).text == "copies in memory: 7.3 GB/s with 1 thread"
    gpus = answering("copies", pinned=True, to_device=[5.5e10, 5.4e10], peers=[[0, 1], [1, 0]], pairs=2)
    text = extras.link(gpus).text
    assert text == "host to GPU, pinned: 55.0 GB/s, 54.0 GB/s; 2 of 2 pairs of GPUs reach each other directly"


@pytest.mark.parametrize("name", extras.OPTIONAL)
def test_an_optional_package_is_never_worse_than_ok(name: str) -> None:
    missing = extras.optional(name, having())
    assert missing.level is OK
    assert missing.text.startswith(f"{name} is not installed (needed for ")
    first = extras.OPTIONAL[name][0][0]
    assert extras.optional(name, lambda asked: {first: "1.2"}[asked]).text == f"{name} 1.2"
