"""`sluice simulate` with every policy.

    PYTHONPATH=tests .venv/bin/python -m research.simulate --trace F.jsonl --params P.json

`best-fixed` is the best cap with the tuner's replicas at it. `oracle` is the best cap, and `aimd`
the limiters' law, with the replicas that `sluice` had.
"""

import argparse
import sys
from collections.abc import Sequence

from research.search import POLICIES, simulate
from sluice.simulate import command


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if what was given cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser, POLICIES)
    return command.main(parser.parse_args(argv), simulate)


if __name__ == "__main__":
    sys.exit(main())
