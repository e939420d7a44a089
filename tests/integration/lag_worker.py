"""`sluice-worker`, which also writes down how late its event loop was: a process for tests.

Each line of the file that LAG_FILE names is one lag of over a millisecond: its milliseconds, and
the CPU time that the loop's thread, and all threads, took meanwhile.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from sluice_worker import run
from sluice_worker.__main__ import main
from sluice_worker.base.config import WorkerConfig
from sluice_worker.engine.client import EngineProcess

LAG_FILE = "SLUICE_TEST_LAGS"
EVERY_S = 0.002
serve = run.serve


async def watch(path: Path) -> None:
    """Write lags until cancelled."""
    with path.open("w", buffering=1) as file:
        while True:
            before_s, cpu_s, all_s = time.monotonic(), time.thread_time(), time.process_time()
            await asyncio.sleep(EVERY_S)
            lag_s = time.monotonic() - before_s - EVERY_S
            if lag_s > 0.001:
                own_s, others_s = time.thread_time() - cpu_s, time.process_time() - all_s
                file.write(f"{1e3 * lag_s:.1f} {1e3 * own_s:.1f} {1e3 * others_s:.1f}\n")


async def watched(config: WorkerConfig, engine: EngineProcess | None) -> None:
    """As `serve`, and watched."""
    watching = asyncio.create_task(watch(Path(os.environ[LAG_FILE])))
    try:
        await serve(config, engine)
    finally:
        watching.cancel()


if __name__ == "__main__":
    run.serve = watched
    sys.exit(main())
