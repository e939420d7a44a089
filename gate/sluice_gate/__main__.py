"""`sluice-gate --upstream URL`: see `config`."""

import sys
from collections.abc import Sequence

from sluice_frontend.process.command import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gate until it is told to leave. Exit status 0, 1 (failed), 2 (cannot start)."""

    def parse(arguments: Sequence[str]) -> object:
        from .config import parse

        return parse(arguments)

    def serve(config: object) -> object:
        from .run import serve

        return serve(config)  # type: ignore[arg-type]

    return run("sluice-gate", sys.argv[1:] if argv is None else argv, parse, serve)


if __name__ == "__main__":
    sys.exit(main())
