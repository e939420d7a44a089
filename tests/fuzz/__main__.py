"""`make fuzz`: each fuzz for minutes. `make test` has the short form, of seconds each.

PYTHONPATH=tests .venv/bin/python -m fuzz --minutes 10 [--only frame]
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m fuzz`: pytest's status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each fuzz; default: 10")
    parser.add_argument("--only", default="", help="as pytest's -k")
    given = parser.parse_args(argv)
    command = [sys.executable, "-m", "pytest", "-v", "--timeout", "0", "-k", given.only, str(HERE)]
    environment = {**os.environ, "SLUICE_FUZZ_SECONDS": str(60 * given.minutes)}
    return subprocess.run(command, env=environment, cwd=HERE.parents[1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
