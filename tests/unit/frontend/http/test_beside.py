"""Large inputs are worked on in one process beside the loop, which is bounded and replaceable."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sluice_core.errors import BodyTooLarge, RequestError, RequestFailed
from sluice_frontend.api.json_body import parse_object
from sluice_frontend.http import beside as module
from sluice_frontend.http.beside import Beside

LARGE = 1 << 20
MEMORY_BYTES = 128 << 20


@pytest.fixture
def beside() -> Iterator[Beside]:
    beside = Beside(inline=10, memory_bytes=MEMORY_BYTES)
    yield beside
    beside.close()


def has_ended(pid: int) -> bool:
    """True if no such process runs; one that its parent has not asked about is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_ended(pid: int) -> None:
    end_s = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < end_s
        time.sleep(0.01)


async def test_small_work_is_done_here_and_large_work_in_one_other_process(beside: Beside) -> None:
    assert await beside.result(10, os.getpid) == os.getpid()
    first, second = [await beside.result(11, os.getpid) for _ in range(2)]
    assert first == second != os.getpid()


@pytest.mark.parametrize("kind", [bytes, bytearray])
async def test_large_bytes_go_there_and_come_back_as_they_are(
    beside: Beside, kind: type[bytes]
) -> None:
    body = kind(b'{"prompt": "%s"}' % (b"x" * LARGE))
    assert await beside.result(LARGE, parse_object, body) == {"prompt": "x" * LARGE}
    assert await beside.result(LARGE, bytes, body) == body


async def test_the_loop_runs_on_while_a_large_body_is_read(beside: Beside) -> None:
    """Read in a thread, this body would hold the loop for all the time of its reading."""
    body = b'{"a": [%s0]}' % (b"1.5," * 2_000_000)
    began_s = time.monotonic()
    reading = asyncio.create_task(beside.result(len(body), len_of, body))
    gaps, before_s = [], time.monotonic()
    while not reading.done():
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - before_s)
        before_s = time.monotonic()
    assert await reading == 1
    assert max(gaps) < (time.monotonic() - began_s) / 4


def len_of(body: bytes) -> int:
    return len(json.loads(body))


async def test_its_errors_are_those_of_the_function(beside: Beside) -> None:
    with pytest.raises(RequestError, match="not JSON") as refused:
        await beside.result(LARGE, parse_object, b"{")
    assert refused.value.http_status == 400
    with pytest.raises(ZeroDivisionError) as failed:
        await beside.result(LARGE, divmod, 1, 0)
    assert "beside.py" in "".join(failed.value.__notes__)


async def test_a_body_that_takes_too_much_memory_is_refused_and_the_next_is_read(
    beside: Beside,
) -> None:
    body = b'{"a": [%s0]}' % (b'"\xc4\x80",' * 2_000_000)  # 5 bytes each; 72 in memory
    pid = await beside.result(LARGE, os.getpid)
    with pytest.raises(BodyTooLarge, match="over 128 MiB"):
        await beside.result(len(body), parse_object, body)
    with pytest.raises(BodyTooLarge):
        await beside.result(LARGE, bytes, MEMORY_BYTES)
    assert await beside.result(LARGE, parse_object, b'{"a": 1}') == {"a": 1}
    assert await beside.result(LARGE, os.getpid) == pid


async def test_what_was_taken_is_given_back_when_it_is_done(beside: Beside) -> None:
    body = b'{"a": [%s0]}' % (b"1.5," * 1_000_000)
    before = await beside.result(LARGE, resident_bytes)
    assert await beside.result(len(body), len_of, body) == 1
    assert await beside.result(LARGE, resident_bytes) < before + (4 << 20)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_the_process_is_light(beside: Beside) -> None:
    await beside.result(LARGE, parse_object, b"{}")
    assert await beside.result(LARGE, resident_bytes) < 40 << 20


async def test_a_process_that_dies_fails_its_request_only(beside: Beside) -> None:
    pid = await beside.result(LARGE, os.getpid)
    with pytest.raises(RequestFailed, match="ended at this one"):
        await beside.result(LARGE, os._exit, 1)
    assert await beside.result(LARGE, os.getpid) != pid
    os.kill(pid := await beside.result(LARGE, os.getpid), signal.SIGKILL)  # while it has no work
    until_ended(pid)
    assert await beside.result(LARGE, os.getpid) != pid


async def test_work_without_end_is_ended(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    with pytest.raises(RequestFailed, match=r"took over 0\.5 s"):
        await beside.result(LARGE, time.sleep, 60)
    monkeypatch.undo()
    assert await beside.result(LARGE, len, b"1234") == 4


async def test_signals_to_a_group_leave_it_to_its_parent(beside: Beside) -> None:
    pid = await beside.result(LARGE, os.getpid)
    for one in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, one)
    assert await beside.result(LARGE, os.getpid) == pid
    beside.close()
    until_ended(pid)


def test_it_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import asyncio, os, uvloop\n"
        "from sluice_frontend.http.beside import Beside\n"
        "async def main():\n"
        "    print(await Beside(0).result(1, os.getpid), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "uvloop.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -signal.SIGKILL
    until_ended(int(ended.stdout))


async def test_work_whose_caller_has_left_confuses_nobody(beside: Beside) -> None:
    left = asyncio.create_task(beside.result(LARGE, time.sleep, 0.2))
    queued = asyncio.create_task(beside.result(LARGE, len, b"12"))
    await asyncio.sleep(0.05)
    left.cancel()
    queued.cancel()
    assert await beside.result(LARGE, len, b"123") == 3
