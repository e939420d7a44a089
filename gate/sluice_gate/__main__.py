"""`sluice-gate --upstream URL`: see `config`."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice_frontend.process import command

if TYPE_CHECKING:
    from .config import GateConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gate until it is told to leave; see `command.run`."""
    return command.run("sluice-gate", sys.argv[1:] if argv is None else argv, _parse, _serve)


def _parse(argv: Sequence[str]) -> "GateConfig":
    from .config import parse  # slow: signals are handled before

    return parse(argv)


async def _serve(config: "GateConfig") -> None:
    from .run import serve

    await serve(config)


if __name__ == "__main__":
    sys.exit(main())
