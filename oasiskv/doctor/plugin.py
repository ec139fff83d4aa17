"""Whether vLLM loads the plug-in, which backend it chooses, and whether it takes our configuration, or a model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from oasiskv.doctor.finding import Finding, Level, gib
from oasiskv.doctor.fresh import Answers, ProbeError

TOPIC = "plug-in"
GROUP = "vllm.general_plugins"
ENTRY = "oasiskv.vllm_plugin:register"


class EntryPoint(Protocol):
    """What we read of :class:`importlib.metadata.EntryPoint`."""

    name: str
    value: str


def entry_point(points: Iterable[EntryPoint]) -> Finding:
    """Whether the installed OasisKV announces itself to vLLM; ``points`` are those of the group."""
    values = {point.value for point in points if point.name == "oasiskv"}
    if values == {ENTRY}:
        return Finding(TOPIC, Level.OK, f"entry point {GROUP}: oasiskv")
    if not values:
        text = f"no entry point {GROUP}: oasiskv; vLLM does not know that OasisKV is there"
        fix = "install OasisKV in this environment: its folder on the path is not enough"
        return Finding(TOPIC, Level.ERROR, text, fix)
    text = f"entry point {GROUP}: oasiskv leads to {', '.join(sorted(values))}, not to {ENTRY} alone"
    return Finding(TOPIC, Level.ERROR, text, "pip uninstall oasiskv until none is left, then install it again")


def allowed(environment: Mapping[str, str]) -> Finding:
    """Whether VLLM_PLUGINS, vLLM's list of the plug-ins that it loads, leaves ours out."""
    value = environment.get("VLLM_PLUGINS")
    if value is None:
        return Finding(TOPIC, Level.OK, "VLLM_PLUGINS is not set: vLLM loads every plug-in")
    if "oasiskv" in value.split(","):
        return Finding(TOPIC, Level.OK, f"VLLM_PLUGINS={value} has oasiskv")
    names = ",".join([*filter(None, value.split(",")), "oasiskv"])
    text = f"VLLM_PLUGINS={value!r} leaves oasiskv out: vLLM does not load it"
    return Finding(TOPIC, Level.ERROR, text, f"unset VLLM_PLUGINS, or VLLM_PLUGINS={names}")


def registered(answers: Answers) -> Finding:
    """Whether vLLM has the connector after it has loaded its plug-ins."""
    try:
        loaded = answers["plugin"]["loaded"]
    except ProbeError as error:
        fix = "install OasisKV again, of the same minor version as vLLM"
        return Finding(TOPIC, Level.ERROR, f"the plug-in fails in vLLM: {error}", fix)
    if loaded:
        return Finding(TOPIC, Level.OK, "active: vLLM loads it, and knows OasisConnector")
    text = "not active: it works when called by hand, but vLLM does not load it"
    return Finding(TOPIC, Level.ERROR, text, "see the lines on the entry point and on VLLM_PLUGINS")


def backend(answers: Answers) -> Finding:
    """Which attention backend vLLM chooses here, and whether it is one that ours stands in for."""
    facts = answers["backend"]
    if not facts["device"]:
        text = f"vLLM finds no device that it can run on ({facts['platform']})"
        return Finding(TOPIC, Level.ERROR, text, "on a machine without a GPU, install the CPU build: oasiskv[cpu]")
    chosen = f"{facts['backend']} on {facts['name']}"
    if facts["device"] != "cpu":
        text = f"vLLM chooses {chosen}: OasisKV has an attention backend for CPUs only in this version"
        return Finding(TOPIC, Level.ERROR, text, "start vLLM without OasisKV, or use the CPU build: oasiskv[cpu]")
    if not facts["path"].startswith("oasiskv."):
        text = f"vLLM chooses {chosen} ({facts['path']}), which is not OasisKV's: another plug-in has replaced it"
        return Finding(TOPIC, Level.ERROR, text, "leave that plug-in out: VLLM_PLUGINS=oasiskv")
    kernels = ", ".join(f"{isa} for {dtype}" for dtype, isa in facts["isa"].items())
    features = ", ".join(answers.known("torch").get("features", ())) or "no vector instructions known"
    return Finding(TOPIC, Level.OK, f"backend {facts['backend']} with OasisKV in it; kernels: {kernels} ({features})")


def engine(answers: Answers, environment: Mapping[str, str]) -> Finding:
    """Whether vLLM takes a configuration with OasisKV on, under the environment as it is."""
    try:
        facts = answers["engine"]
    except ProbeError as error:
        text = f"vLLM refuses a configuration with OasisKV: {error}"
        set_here = ", ".join(sorted(name for name in environment if name.startswith("VLLM_")))
        fix = f"one of these may ask for it, try without: {set_here}" if set_here else "install vLLM and OasisKV again"
        return Finding(TOPIC, Level.ERROR, text, fix)
    text = f"vLLM takes a configuration with OasisKV: {facts['runner']} runner, blocks of {facts['block_size']} tokens"
    return Finding(TOPIC, Level.OK, text)


def model(answers: Answers, name: str) -> Finding:
    """Whether a model's configuration is one that OasisKV serves, and what its KV costs."""
    try:
        facts = answers["model"]
    except ProbeError as error:
        if "OasisKV" in str(error):
            return Finding("model", Level.ERROR, f"{name}: {error}", "or choose another model")
        text = f"{name}: its configuration cannot be read: {error}"
        return Finding(
            "model", Level.ERROR, text, "give a folder, or a name that is in the cache: nothing is fetched here"
        )
    kind = f"{name}: {facts['architecture']}, {facts['full_layers']} of {facts['layers']} layers with full attention"
    if not facts["full_layers"]:
        text = f"{kind}: nothing for OasisKV to do"
        return Finding("model", Level.WARNING, text, "start it without OasisKV")
    whole = gib(facts["token_bytes"] * facts["context"])
    text = (
        f"{kind}; their KV takes {facts['token_bytes']:,} bytes per token ({facts['dtype']}), "
        f"{whole} for a context of {facts['context']:,}"
    )
    return Finding("model", Level.OK, text)
