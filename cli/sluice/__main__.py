"""`sluice`: one module a command, imported only when its command is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

COMMANDS = {
    "bench": "the same bursts at several caps of one running server",
    "demo": "see the whole promise on a real cluster",
    "load": "closed- and open-loop load on an OpenAI endpoint",
    "report": "what one service promised, held and cost, and what would help",
    "serve": "one model on this machine, without Kubernetes",
    "simulate": "a model of pods under a trace, tuned by the operator's own code",
    "status": "one service's plan, cap, evidence, conditions and history",
    "plan": "the memory arithmetic of a checkpoint, without a pod",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run its command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="sluice", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = next((a for a in arguments if a in COMMANDS), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            _imported(name).add_arguments(command)
    args = parser.parse_args(arguments)
    try:
        return int(_imported(args.command).main(args))
    except KeyboardInterrupt:
        print(f"sluice {args.command}: interrupted", file=sys.stderr)
        return 130


def _imported(command: str) -> Any:
    try:
        return importlib.import_module(f"sluice.{command}")
    except ModuleNotFoundError as e:
        sys.exit(f"sluice {command}: {e.name} is not installed here, as in the operator's image")


if __name__ == "__main__":
    sys.exit(main())
