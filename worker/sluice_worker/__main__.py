"""`sluice-worker`: one model over HTTP, with or without Kubernetes."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sluice_frontend.process import command

if TYPE_CHECKING:
    import logging

    from .base.config import WorkerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to leave; see `command.run`."""
    return run("sluice-worker", sys.argv[1:] if argv is None else argv)


def run(
    program: str,
    argv: Sequence[str],
    formatter: "Callable[[WorkerConfig], logging.Formatter] | None" = None,
) -> int:
    """The same under another name, with log lines as `formatter` makes them."""
    return command.run(program, argv, _parse, _serve, formatter)


def _parse(argv: Sequence[str]) -> "WorkerConfig":
    from .base.config import parse  # slow: signals are handled before

    return parse(argv)


async def _serve(config: "WorkerConfig") -> None:
    """Both processes import at the same time, as neither does so in less than a second."""
    from .engine.client import spawn

    engine = None if config.hub else await spawn(config.engine)
    try:
        from .run import serve

        await serve(config, engine)
    finally:
        if engine is not None:
            await engine.end()


if __name__ == "__main__":
    sys.exit(main())
