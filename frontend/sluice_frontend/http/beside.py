"""*Rim*: work on large inputs of clients, in one process beside the event loop's.

Python's and msgspec's readers of JSON hold the interpreter until they are done, so in a thread they
would stop all streams: 8 bodies of 4 MiB did for 1.0 to 2.2 s (measured). The process is light, is
started when first needed, works on one input at a time, and ends with its parent.

This module imports little, because that process begins with it.
"""

import asyncio
import gc
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from sluice_core.errors import BodyTooLarge, RequestFailed
from sluice_core.heap import release_freed

from .offload import keep_little

T = TypeVar("T")
INLINE_BYTES = 1 << 16
"""Inputs up to this cost the loop less than 20 ms."""
LIMIT_S = 30.0
"""Seconds of one piece of work; the bounds of bodies leave it far less to do."""
NICENESS = 5
"""The loop's work goes first."""
KEPT_BYTES = 1 << 16
"""Bytes objects over this are sent as they are; pickling would copy them."""


_BEGIN = f"import sys; from {__name__} import main; main(*sys.argv[1:])"


class Answer(NamedTuple):
    """What a piece of work came to: its result, or its error."""

    value: Any
    error: BaseException | None = None


class Beside:
    """Runs functions of modules on large inputs. All methods belong to the loop's thread."""

    def __init__(self, inline: int = INLINE_BYTES, memory_bytes: int = resource.RLIM_INFINITY):
        """Work of a size up to `inline` is done here and at once. `memory_bytes`: the most that the
        process may ever take; an input that needs more is refused with a 413."""
        self._inline, self._memory_bytes = inline, memory_bytes
        self._turns = ThreadPoolExecutor(1, "beside")
        self._child: _Child | None = None

    async def result(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`, in its turn. Raises its error; BodyTooLarge, and RequestFailed if the
        process ended or took too long."""
        if size <= self._inline:
            return function(*args)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._turns, self._ask, function, args)
        if isinstance(answer.error, MemoryError):
            raise BodyTooLarge(
                f"this takes over {self._memory_bytes >> 20} MiB of memory once it is read, which "
                "is the limit for one request; send it in parts"
            ) from answer.error
        if answer.error is not None:
            raise answer.error
        value: T = answer.value
        return value

    def _ask(self, function: Callable[..., object], args: Sequence[object]) -> Answer:
        """In the thread of turns."""
        if self._child is None or not self._child.is_alive:
            self._child = _Child(self._memory_bytes)
        try:
            _send(self._child.link, (function, [_uncopied(each) for each in args]))
            if not self._child.link.poll(LIMIT_S):
                raise TimeoutError
            answer: Answer = _received(self._child.link)
            return answer
        except (OSError, EOFError) as error:
            self._child.end()
            why = f"took over {LIMIT_S:g} s" if isinstance(error, TimeoutError) else "ended"
            sentence = f"the process that reads large requests {why} at this one"
            return Answer(None, RequestFailed(sentence))

    def close(self) -> None:
        """End the process; work in it fails, work in the queue is cancelled."""
        self._turns.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.end()


class _Child:
    """The process, as its parent sees it."""

    def __init__(self, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, str(theirs.fileno()), str(memory_bytes)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.link = Connection(ours.detach())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """At once: what it works on, nobody waits for."""
        self._process.kill()
        self._process.wait()


def _uncopied(value: object) -> object:
    is_large = isinstance(value, bytes | bytearray) and len(value) > KEPT_BYTES
    return pickle.PickleBuffer(value) if is_large else value  # type: ignore[arg-type]


def _send(link: "Connection[Any, Any]", message: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    link.send_bytes(len(buffers).to_bytes(4, "big"))
    link.send_bytes(data)
    for buffer in buffers:
        link.send_bytes(buffer)


def _received(link: "Connection[Any, Any]") -> Any:
    num_buffers = int.from_bytes(link.recv_bytes(), "big")
    data = link.recv_bytes()
    buffers = [link.recv_bytes() for _ in range(num_buffers)]
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - both ends are this module


def _answer(function: Callable[..., object], args: Sequence[Any]) -> Answer:
    try:
        return Answer(function(*args))
    except MemoryError:
        return Answer(None, MemoryError())  # without the frames that hold the memory
    except Exception as error:
        error.add_note(traceback.format_exc())  # where it was raised: a log shows notes
        return Answer(None, error.with_traceback(None))


def work(link: "Connection[Any, Any]") -> None:
    """Serve the parent until it closes its end, or ends."""
    while True:
        try:
            function, args = _received(link)
            answer = _answer(function, args)
            del args
            try:
                _send(link, answer)
            except MemoryError:  # in pickling: nothing was sent yet
                _send(link, Answer(None, MemoryError()))
            del answer
        except (OSError, EOFError):
            return
        gc.collect()
        release_freed()


def main(number: str, memory_bytes: str) -> None:
    """Run the process: signals are for its parent, with which it ends."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    os.nice(NICENESS)
    keep_little()
    limit = int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    gc.disable()  # a walk through a body's million values takes longer than its reading
    work(Connection(int(number)))
