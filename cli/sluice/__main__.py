"""`sluice`: one module a command, imported only when its command is called."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

COMMANDS = {
    "batch": "Send all requests of a file or a folder, and append each answer to a file.",
    "bench": "Send one running server the same bursts at several caps, and say what each brings.",
    "from": "Print a Deployment of an engine as the InferenceService that says the same.",
    "gate": "Stand before an engine that runs already: a live cap, a queue, evidence and metrics.",
    "load": "Send an OpenAI endpoint closed- or open-loop load or bursts; one JSON object a line.",
    "report": "Say what one service promised, held and cost, and what would help.",
    "serve": "Serve one model on this machine, without Kubernetes.",
    "simulate": "Run the operator's tuner, or another policy, on a model of pods under a trace.",
    "status": "Show one service's plan, cap, evidence, conditions and history.",
    "ui": "Show services, or one server, live in a browser on this machine.",
    "plan": "Work out whether a checkpoint fits, and for how many sequences, without a pod.",
}
MODULES = {"from": "manifest"}
"""Modules of commands whose names Python keeps for itself."""
EXIT_SIGPIPE = 141
"""Exit code that a shell reports for a program that wrote to a reader who had left."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run its command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in arguments if a in COMMANDS), "")
    program = f"sluice {chosen}".rstrip()
    try:
        try:
            return _run(arguments, chosen)
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()
        return EXIT_SIGPIPE
    except OSError as e:
        print(f"{program}: {e}", file=sys.stderr)
        _discard_output()
        return 1


def _run(arguments: list[str], chosen: str) -> int:
    from importlib.metadata import version  # takes time, in which a Ctrl-C may come

    parser = argparse.ArgumentParser(
        prog="sluice",
        description="Serve models, measure what serves them, and look at InferenceServices.",
        epilog="`sluice COMMAND --help` says more of each.",
    )
    parser.add_argument("--version", action="version", version=version("sluice"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, formatter_class=_Help)
        if name == chosen:
            _imported(name).add_arguments(command)
    args, unknown = parser.parse_known_args(arguments)
    if args.command in ("batch", "gate"):
        args.flags, unknown = unknown, []
    if unknown:
        order = "; flags go after MODEL" if args.command == "serve" else ""
        told = f"unrecognized arguments: {' '.join(unknown)}{order}"
        commands.choices[args.command].error(told)
    return int(_imported(args.command).main(args))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = not isinstance(action.default, bool | None)
        return super()._get_help_string(action) if has_default else action.help


def _discard_output() -> None:
    """Otherwise the buffered rest would fail once more at the end of the process."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _imported(command: str) -> Any:
    try:
        return importlib.import_module(f"sluice.{MODULES.get(command, command)}")
    except ImportError as e:  # even if only a part of a package is missing
        sys.exit(f"sluice {command}: {e.name} is not installed here, as in the operator's image")


if __name__ == "__main__":
    sys.exit(main())
