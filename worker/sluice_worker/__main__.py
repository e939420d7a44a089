"""`sluice-worker`: one model over HTTP, with or without Kubernetes.

What takes time to import is imported where it is needed: signals are to be heard before.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    from .config import WorkerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to leave. Exit status 0, 1 (engine died), 2 (cannot start)."""
    return run("sluice-worker", sys.argv[1:] if argv is None else argv)


def run(
    program: str,
    argv: Sequence[str],
    formatter: "Callable[[WorkerConfig], logging.Formatter] | None" = None,
) -> int:
    """The same under another name, with log lines as `formatter` makes them."""
    with _leaving_at_once():
        import uvloop

        from .config import parse
        from .errors import ConfigError, StartupError
        from .server import logs

        try:
            config = parse(argv)
            lines = formatter(config) if formatter else logs.EventFormatter()
            logs.install(os.environ.get("SLUICE_LOG_LEVEL") or "INFO", lines)
            return uvloop.run(_serve(config))
        except ConfigError as error:
            for problem in error.problems:
                print(f"{program}: {problem}", file=sys.stderr)
            return error.exit_status
        except StartupError as error:
            print(f"{program}: {error.message}", file=sys.stderr)
            return error.exit_status


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the process until the event loop handles them: nothing is open yet.

    The kernel drops a signal that process 1, as in a container, has no handler for. Not by an
    exception, which an import may swallow; the engine process ends with the socket to it.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(config: "WorkerConfig") -> int:
    """Both processes import at the same time, as neither does so in less than a second."""
    from .client import spawn

    engine = None if config.hub else await spawn(config.engine)
    try:
        from .server.run import serve

        return await serve(config, engine)
    finally:
        if engine is not None:
            await engine.end()


if __name__ == "__main__":
    sys.exit(main())
