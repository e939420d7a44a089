"""*rim*: `sluice gate --upstream URL`: a gate before an engine that runs already."""

import argparse
import os
import sys

MODULE = "sluice_gate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "All flags are those of sluice-gate: see `sluice-gate --help`."


def main(args: argparse.Namespace) -> int:
    """Becomes `sluice-gate`, which says by itself what is wrong with its flags."""
    os.execv(sys.executable, line(args.flags))  # noqa: S606 - no shell is wanted


def line(flags: list[str]) -> list[str]:
    """The command line of a gate."""
    return [sys.executable, "-m", MODULE, *flags]
