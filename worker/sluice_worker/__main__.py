"""`sluice-worker`: one model over HTTP, with or without Kubernetes.

Slow imports are done where they are needed, so that signals are handled before.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    from .base.config import WorkerConfig

MAX_WORD_BYTES = 4096
"""The kubelet cuts what is longer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to leave. Exit status 0, 1 (engine died), 2 (cannot start).

    SLUICE_TERMINATION_LOG, which the operator sets, names a file for the sentence that says why.
    """
    return run("sluice-worker", sys.argv[1:] if argv is None else argv)


def run(
    program: str,
    argv: Sequence[str],
    formatter: "Callable[[WorkerConfig], logging.Formatter] | None" = None,
) -> int:
    """The same under another name, with log lines as `formatter` makes them."""
    with _leaving_at_once():
        import uvloop
        from sluice_core.errors import SluiceError
        from sluice_frontend.http import logs

        from .base.config import parse

        try:
            config = parse(argv)
            lines = formatter(config) if formatter else logs.EventFormatter()
            logs.install(os.environ.get("SLUICE_LOG_LEVEL") or "INFO", lines)
            uvloop.run(_serve(config))
        except SluiceError as error:
            _leave_word(program, error.message)
            return error.exit_status
        except Exception as error:
            _leave_word(program, _unexpected(error))
            return 1
        return 0


def _unexpected(error: Exception) -> str:
    """A sentence for an unexpected error. Only the log has its traceback."""
    import logging
    import time

    from sluice_core.errors import timestamp, told

    logging.getLogger(__name__).exception("failed")
    return f"the API process failed at {timestamp(time.time())}: {told(error)}"


def _leave_word(program: str, sentences: str) -> None:
    """Say why the process ends: the last lines of its output, and all that Kubernetes shows."""
    path = os.environ.get("SLUICE_TERMINATION_LOG")
    if path:
        try:
            with open(path, "wb") as file:
                file.write(sentences.encode(errors="backslashreplace")[:MAX_WORD_BYTES])
        except OSError as error:
            print(f"{program}: {path} cannot be written: {error.strerror}", file=sys.stderr)
    for sentence in sentences.splitlines():
        print(f"{program}: {sentence}", file=sys.stderr)


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the process until the event loop handles them: nothing is open yet.

    The kernel drops signals without a handler for process 1, as in a container. The handler raises
    no exception, which an import may swallow. The engine process ends with its socket.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(config: "WorkerConfig") -> None:
    """Both processes import at the same time, as neither does so in less than a second."""
    from .engine.client import spawn

    engine = None if config.hub else await spawn(config.engine)
    try:
        from .api.run import serve

        await serve(config, engine)
    finally:
        if engine is not None:
            await engine.end()


if __name__ == "__main__":
    sys.exit(main())
