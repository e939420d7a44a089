"""`sluice-worker`: one model over HTTP, with or without Kubernetes."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

import uvloop

from .client import spawn
from .config import WorkerConfig, parse
from .errors import ConfigError, StartupError
from .server import logs


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to leave. Exit status 0, 1 (engine died), 2 (cannot start)."""
    return run("sluice-worker", sys.argv[1:] if argv is None else argv)


def run(
    program: str,
    argv: Sequence[str],
    formatter: Callable[[WorkerConfig], logging.Formatter] = lambda config: logs.EventFormatter(),
) -> int:
    """The same under another name, with log lines as `formatter` makes them."""
    try:
        config = parse(argv)
        logs.install(os.environ.get("SLUICE_LOG_LEVEL", "INFO"), formatter(config))
        return uvloop.run(_serve(config))
    except ConfigError as error:
        for problem in error.problems:
            print(f"{program}: {problem}", file=sys.stderr)
        return error.exit_status
    except StartupError as error:
        print(f"{program}: {error.message}", file=sys.stderr)
        return error.exit_status


async def _serve(config: WorkerConfig) -> int:
    """Both processes import at the same time, as neither does so in less than a second."""
    engine = None if config.hub else await spawn(config.engine)
    try:
        from .server.run import serve

        return await serve(config, engine)
    finally:
        if engine is not None:
            await engine.end()


if __name__ == "__main__":
    sys.exit(main())
