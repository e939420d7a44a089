"""*Rim*: `sluice-gate` that tells how long its event loop is held.

    python -m integration.gate_watched FILE --upstream URL ...

FILE gets a line for each turn of the loop over TELL_MS: its CPU time, and when it ended.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from sluice_frontend.process import command
from sluice_gate.config import GateConfig, parse
from sluice_gate.run import serve

TELL_MS = 5.0


async def watch(told: Path) -> None:
    """Look each millisecond; the loop's thread is this one."""
    with told.open("a") as lines:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            held_ms = 1e3 * (time.thread_time() - before_s)
            if held_ms > TELL_MS:
                lines.write(json.dumps({"at_s": time.monotonic(), "ms": round(held_ms, 1)}) + "\n")
                lines.flush()
            before_s = time.thread_time()


async def serve_watched(config: GateConfig) -> None:
    """As `sluice_gate.run.serve`."""
    watching = asyncio.create_task(watch(Path(sys.argv[1])))
    try:
        await serve(config)
    finally:
        watching.cancel()


if __name__ == "__main__":
    sys.exit(command.run("sluice-gate", sys.argv[2:], parse, serve_watched))
