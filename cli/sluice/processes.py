"""*rim*: processes that a command starts, and that end with it."""

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress

LEAVES_S = 30.0
"""Seconds that a process gets to end; it has no open request by then."""
PR_SET_PDEATHSIG = 1
PORTS = range(20_000, 30_000)
"""Below those that Linux lends to connections and Kubernetes to NodePorts."""


def free_ports(num: int) -> list[int]:
    """Return different ports of loopback on which nobody listens. Raises IndexError: too few.

    A server takes its port seconds later, and no connection may have got it by then, not even one
    that asks for this server.
    """
    found, tried = list[int](), random.sample(PORTS, len(PORTS))
    while len(found) < num:
        port = tried.pop()
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


async def spawn(
    words: list[str],
    environ: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    stdout: int | None = None,
) -> Process:
    """A process in a session of its own, which a Ctrl-C does not reach. `prepare` runs in it."""
    return await asyncio.create_subprocess_exec(
        *words, env=environ, start_new_session=True, preexec_fn=prepare, stdout=stdout
    )


async def end(process: Process, limit_s: float | None) -> None:
    """Ask it to end, and end it after `limit_s`."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        kill(process)
        await process.wait()


def kill(process: Process) -> None:
    """End it with its children, at once."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Have Linux end this process when its parent ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
