"""*rim*: processes that a command starts, and that end with it."""

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping

LEAVES_S = 30.0
"""Seconds that a process gets to end; it has no open request by then."""
PR_SET_PDEATHSIG = 1


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
