"""A real gate whose connections, open requests and places one client would hold for ever."""

import asyncio
import json
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
from integration.worker_process import Worker
from sluice_frontend.config import ServerConfig
from unit.gate.crowds import Client, both, keyed, until


def connect(stack: ExitStack, running: Worker, sent: bytes, source: str) -> socket.socket:
    """A connection from `source` that has sent these bytes and reads nothing."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((source, 0))
    client.connect(("127.0.0.1", httpx.URL(running.url).port))
    client.sendall(sent)
    return client


def post(path: str, body: object, key: str = "") -> bytes:
    data = json.dumps(body).encode()
    bearer = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{bearer}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def is_closed(client: socket.socket) -> bool:
    """True if the other end has closed it; what came before is read and dropped."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


async def test_texts_that_hang_in_the_engine_are_bounded_by_client_and_together(
    tmp_path: Path,
) -> None:
    async with (
        both(tmp_path, *keyed(tmp_path)) as (engine, running),
        Client(running.url, key="a") as first,
        Client(running.url, key="b") as second,
    ):
        tasks = [asyncio.create_task(first.ask("/tokenize", prompt="held")) for _ in range(300)]
        await until(lambda: engine.running + first.statuses[429] == 300)
        assert engine.running == 64
        tasks += [asyncio.create_task(second.ask("/tokenize", prompt="held")) for _ in range(40)]
        await until(lambda: engine.running + second.statuses[429] == 64 + 40)
        assert engine.running == 64 + 12  # four fifths of what is free
        assert (await second.ask())[0] == 200
        engine.may_end.set()
        await asyncio.gather(*tasks)


async def test_readers_that_stall_lose_their_places_and_hold_up_no_other(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "2", "--write-timeout", "1", *keyed(tmp_path))
    async with (
        both(tmp_path, *flags) as (engine, running),
        Client(running.url, key="b") as second,
    ):
        with ExitStack() as stack:
            flood = post("/v1/completions", {"model": "m", "prompt": "flood", "stream": True}, "a")
            stalled = [connect(stack, running, flood, "127.0.0.1") for _ in range(6)]
            await until(lambda: engine.running == 2)
            for _ in range(3):
                assert (await asyncio.wait_for(second.ask(), 30))[0] == 200
            ready = await asyncio.to_thread(httpx.get, running.url + "/readyz", timeout=10)
            assert ready.status_code == 200
            await until(lambda: engine.num_floods_ended == len(stalled))
            await until(lambda: all(map(is_closed, stalled)))


async def test_one_address_never_has_all_connections(tmp_path: Path) -> None:
    """Its busy ones are as many as a lone address may have. Others get in all the same."""
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    async with both(tmp_path, *flags) as (_, running):
        with ExitStack() as stack:
            half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
            held = []
            for _ in range(1700):
                held.append(connect(stack, running, half, "127.0.0.1"))
                if len(held) % 100 == 0:
                    await asyncio.sleep(0.05)
            async with Client(running.url, address="127.0.0.2") as second:
                status, _ = await asyncio.wait_for(second.ask(), 10)
                assert status == 200
            open_ones = [client for client in held if not is_closed(client)]
            assert 0 < len(open_ones) <= 1 + 1 + 2 * 64 + 1024


async def test_an_idle_connection_lasts_as_long_as_the_flag_says(tmp_path: Path) -> None:
    async with both(tmp_path, "--keep-alive-timeout", "2") as (_, running):
        with ExitStack() as stack:
            get = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
            client = connect(stack, running, get, "127.0.0.1")
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            await until(lambda: is_closed(client))
            assert 1.5 < loop.time() - began_s < 20


def test_idle_connections_outlive_those_of_every_proxy_in_front() -> None:
    assert ServerConfig().keep_alive_timeout > 600  # Google's; Go's and Traefik's are 90 s
