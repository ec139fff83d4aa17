"""The repair of an environment removes what does not fit the installed torch, and nothing else."""

from __future__ import annotations

import pytest

from oasiskv.cli.repair import broken_packages, import_output, repair

NMS = "RuntimeError: operator torchvision::nms does not exist"
NO_CUDA = (
    "OSError: libc10_cuda.so: cannot open shared object file: No such file or directory\n"
    "The above exception was the direct cause of the following exception:\n"
    "OSError: Could not load this library: torchaudio/lib/_torchaudio.so"
)
SYMBOL = "ImportError: _C.so: undefined symbol: _ZN3c104cuda9SetDeviceEab"
NO_FFMPEG = "OSError: libavutil.so.59: cannot open shared object file: No such file or directory"


def environment(**failures: str | None) -> tuple[object, object]:
    """What is installed, and how its import fails (None: it works)."""
    return failures.__contains__, failures.__getitem__


@pytest.mark.parametrize("output", [NMS, NO_CUDA, SYMBOL])
def test_a_library_built_for_another_torch_is_broken(output: str) -> None:
    assert broken_packages(*environment(torchvision=output)) == ["torchvision"]


@pytest.mark.parametrize("output", [None, NO_FFMPEG, "ModuleNotFoundError: No module named 'PIL'", ""])
def test_one_that_works_or_fails_for_another_reason_is_left_alone(output: str | None) -> None:
    assert broken_packages(*environment(torchvision=output, torchcodec=output)) == []


def test_one_that_is_not_installed_is_not_tried() -> None:
    assert broken_packages(*environment()) == []


def test_only_the_broken_ones_are_removed_and_the_user_is_told() -> None:
    removed: list[list[str]] = []
    said: list[str] = []
    installed, failure_of = environment(torchvision=NMS, torchaudio=None, torchcodec=NO_CUDA)
    assert repair(installed, failure_of, removed.append, said.append) == ["torchvision", "torchcodec"]
    assert removed == [["torchvision", "torchcodec"]]
    assert len(said) == 1
    assert "torchvision, torchcodec" in said[0]


def test_a_sound_environment_is_left_alone_in_silence() -> None:
    said: list[str] = []

    def remove(packages: list[str]) -> None:
        raise AssertionError(packages)

    installed, failure_of = environment(torchvision=None)
    assert repair(installed, failure_of, remove, said.append) == []
    assert said == []


def test_the_import_is_tried_in_a_fresh_python() -> None:
    assert import_output("json") is None
    assert "No module named 'no_such_library'" in str(import_output("no_such_library"))
