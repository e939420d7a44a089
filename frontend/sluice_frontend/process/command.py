"""*Rim*: a server's command, from its arguments to its exit status.

Slow imports are done where they are needed, so that signals are handled before.
"""

import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import logging

Config = TypeVar("Config")

MAX_WORD_BYTES = 4096
"""The kubelet cuts what is longer."""


def run(
    program: str,
    argv: Sequence[str],
    parse: Callable[[Sequence[str]], Config],
    serve: Callable[[Config], Coroutine[None, None, None]],
    formatter: "Callable[[Config], logging.Formatter] | None" = None,
) -> int:
    """Serve what `parse` makes of `argv` until told to leave. `formatter` makes the log lines.

    Exit status 0, 1 (failed while serving), 2 (cannot start). SLUICE_TERMINATION_LOG, which the
    operator sets, names a file for the sentence that says why.
    """
    with _leaving_at_once():
        import uvloop
        from sluice_core.errors import SluiceError

        from ..http import logs

        try:
            config = parse(argv)
            lines = formatter(config) if formatter else logs.EventFormatter()
            logs.install(os.environ.get("SLUICE_LOG_LEVEL") or "INFO", lines)
            uvloop.run(serve(config))
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
