"""Large bodies at a real gate: its memory, and that of the process that reads them beside it."""

import asyncio
import os
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import aiohttp
from integration.gate_process import Call, made_up_engine
from integration.worker_process import Worker, gate_of

BODY_BYTES, NUM = 32 << 20, 12
LIMIT_BYTES = (192 << 20) + 7 * BODY_BYTES
"""The memory limit of a gate's container, as `children.pod` gives it for such bodies."""


def resident_bytes(gate: Worker) -> int:
    """Resident memory of the gate and of the process beside it."""
    tasks = Path(f"/proc/{gate.process.pid}/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    pages = [
        int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        for pid in {gate.process.pid, *children}
    ]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


async def test_a_body_takes_memory_only_until_the_engine_has_it(tmp_path: Path) -> None:
    """Two have room at once. All are answered, though no answer ends until all have come."""
    have_come, num_come, peak = asyncio.Event(), 0, 0

    async def answers(call: Call) -> None:
        nonlocal num_come
        num_come += 1
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        if num_come == NUM:
            have_come.set()
        await have_come.wait()
        await call.write(b"{}")

    async def ask(client: aiohttp.ClientSession, url: str) -> int:
        body = b'{"prompt": "' + b"a " * ((BODY_BYTES - 14) // 2) + b'"}'
        async with client.post(url + "/v1/completions", data=BytesIO(body)) as answer:
            await answer.read()
            return answer.status

    async def watch(gate: Worker) -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident_bytes(gate))
            await asyncio.sleep(0.02)

    flags = ("--max-body-bytes", str(BODY_BYTES), "--memory-bytes", str(4 * BODY_BYTES))
    async with made_up_engine(answers) as upstream, aiohttp.ClientSession() as client:
        with ExitStack() as stack:  # the engine must answer while the gate starts
            made = gate_of(upstream, tmp_path, *flags)
            gate = await asyncio.to_thread(stack.enter_context, made)
            watching = asyncio.create_task(watch(gate))
            try:
                statuses = await asyncio.gather(*(ask(client, gate.url) for _ in range(NUM)))
            finally:
                watching.cancel()
    assert statuses == NUM * [200]
    assert peak < LIMIT_BYTES, peak >> 20
