"""OpenAI's batches in one process: what is tried again, how they end, and who goes on with them."""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sluice_frontend.batches import inside, runner
from sluice_frontend.batches.records import Records
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from unit.frontend.batches.kept import Kept, Lines, kept, until, well

IDS = [str(i) for i in range(12)]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"TICK_S": 0.02, "LOOK_S": 0.05, "LEAVE_S": 0.5, "PAUSE_S": 0.1}.items():
        monkeypatch.setattr(runner, name, seconds)
    monkeypatch.setattr(inside, "BACKOFF_S", 0.01)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def server(tmp_path: Path, lines: Lines) -> AsyncIterator[Kept]:
    async with kept(tmp_path, lines) as found:
        yield found


async def hold(body: Any, request: Request) -> Response:
    """Answer nobody, until the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


async def test_lines_go_as_background_work_of_whoever_made_the_batch(
    server: Kept, lines: Lines
) -> None:
    server.salt = "a-salt"
    done = await server.until(await server.create(*IDS), "completed")
    assert sorted(lines.asked) == sorted(IDS)
    assert {(each["salt"], each["client"]) for each in lines.states} == {("a-salt", "somebody")}
    assert {each["x-slo-class"] for each in lines.headers} == {"background"}
    assert {each["content-type"] for each in lines.headers} == {"application/json"}
    assert len({each["request_id"] for each in lines.states}) == len(IDS)
    assert done["usage"]["input_tokens"] == 3 * len(IDS)
    assert done["usage"]["input_tokens_details"] == {"cached_tokens": len(IDS)}


async def test_as_many_are_under_way_as_the_engine_holds_twice(server: Kept, lines: Lines) -> None:
    async def slow(body: Any, request: Request) -> Response:
        await asyncio.sleep(0.01)
        return await well(body, request)

    lines.says = slow
    await server.until(await server.create(*IDS), "completed")
    assert lines.most_open == 4


@pytest.mark.parametrize(("status", "num"), [(429, 6), (503, 6), (500, 3), (502, 3), (400, 1)])
async def test_a_server_without_room_is_asked_again_and_what_fails_by_itself_few_times(
    server: Kept, lines: Lines, status: int, num: int
) -> None:
    async def says(body: Any, request: Request) -> Response:
        if body["input"] == "bad" and lines.asked.count("bad") < 6:
            return JSONResponse({"error": "no"}, status)
        return await well(body, request)

    lines.says = says
    done = await server.until(await server.create("bad", *IDS), "completed")
    assert lines.asked.count("bad") == num
    assert len(lines.asked) == len(IDS) + num
    assert done["request_counts"]["failed"] == (status in (500, 502, 400))
    if done["error_file_id"]:
        [bad] = (await server.results(done["error_file_id"])).values()
        assert (bad["response"]["status_code"], bad["error"]) == (status, None)


async def test_a_line_that_makes_the_server_raise_is_an_error_line(
    server: Kept, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async def says(body: Any, request: Request) -> Response:
        if body["input"] == "3":
            raise ZeroDivisionError
        return await well(body, request)

    lines.says = says
    done = await server.until(await server.create(*IDS), "completed")
    assert done["request_counts"] == {"total": 12, "completed": 11, "failed": 1}
    [bad] = (await server.results(done["error_file_id"])).values()
    assert bad["response"]["status_code"] == 500
    assert "ZeroDivisionError" in caplog.text


async def test_cancel_leaves_what_is_under_way_and_keeps_what_is_done(
    server: Kept, lines: Lines
) -> None:
    async def says(body: Any, request: Request) -> Response:
        return await (well if body["input"] in ("0", "behind") else hold)(body, request)

    lines.says = says
    batch_id = await server.create(*IDS)
    behind = await server.create("behind")
    await until(lambda: _is(lines.num_open == 4))
    shown = (await server.client.post(f"/v1/batches/{batch_id}/cancel")).json()
    assert shown["status"] == "cancelling"
    assert shown["cancelling_at"]
    done = await server.until(batch_id, "cancelled")
    assert done["cancelled_at"]
    assert done["error_file_id"] is None
    assert done["request_counts"] == {"total": 12, "completed": 1, "failed": 0}
    assert (await server.results(done["output_file_id"])).keys() == {"0"}
    await server.until(behind, "completed")
    assert lines.num_open == 0


async def _is(value: bool) -> bool:
    return value


async def test_a_batch_whose_time_is_over_tells_each_line_that_was_not_sent(
    server: Kept, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def says(body: Any, request: Request) -> Response:
        return await (well if body["input"] in "01" else hold)(body, request)

    lines.says = says
    batch_id = await server.create(*IDS)
    records = Records(server.root)
    await until(lambda: _is(lines.num_open == 4))
    monkeypatch.setattr("sluice_frontend.batches.records.now_s", lambda: 1 << 40)
    done = await server.until(batch_id, "expired")
    good = await server.results(done["output_file_id"])
    bad = await server.results(done["error_file_id"])
    assert good.keys() == {"0", "1"}
    assert bad.keys() == set(IDS) - {"0", "1"}
    assert {each["error"]["code"] for each in bad.values()} == {"batch_expired"}
    assert done["request_counts"] == {"total": 12, "completed": 2, "failed": 10}
    assert not records.live()


async def test_a_server_that_drains_sends_nothing_more_and_the_next_one_goes_on(
    tmp_path: Path, lines: Lines
) -> None:
    gate = asyncio.Event()

    async def says(body: Any, request: Request) -> Response:
        if len(lines.asked) > 4:
            await gate.wait()
        return await well(body, request)

    lines.says = says
    async with kept(tmp_path, lines) as first:
        batch_id = await first.create(*IDS)
        await until(lambda: _is(lines.num_open == 4))
        first.runtime.drain()
        await asyncio.sleep(0.1)
        gate.set()
        await until(lambda: _is(lines.num_open == 0))
        assert len(lines.asked) == 8
        assert (await first.batch(batch_id))["status"] == "in_progress"
        async with kept(tmp_path, lines) as second:
            done = await second.until(batch_id, "completed")
            assert sorted(lines.asked) == sorted(IDS)
            assert (await second.results(done["output_file_id"])).keys() == set(IDS)


async def test_a_full_disk_fails_the_batch_and_keeps_what_is_done(
    server: Kept, lines: Lines, small_files: None
) -> None:
    async def says(body: Any, request: Request) -> Response:
        return JSONResponse({"text": "x" * 3000})

    lines.says = says
    done = await server.until(await server.create(*IDS), "failed")
    [problem] = done["errors"]["data"]
    assert problem["code"] == "disk_full"
    assert "File too large" in problem["message"]
    num = done["request_counts"]["completed"]
    assert 0 < num < 12
    assert len(await server.results(done["output_file_id"])) == num
    answer = await server.upload(b"x" * 20_000)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (507, "not_stored")
    assert not [path for path in (server.root / "files").iterdir() if path.name.startswith(".")]


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_process_that_is_killed_while_a_batch_ends_leaves_that_to_another(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of a record is the last one of some process."""
    for num_writes in range(1, 6):
        root = tmp_path / str(num_writes)
        root.mkdir()
        lines.asked.clear()
        left = num_writes

        def save(self: Records, record: Any, save: Any = Records.save) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("killed")
            save(self, record)

        with monkeypatch.context() as patch:
            patch.setattr(Records, "save", save)
            async with kept(root, lines) as first:
                batch_id = await first.create(*IDS)
                await asyncio.sleep(0.2)
        async with kept(root, lines) as second:
            done = await second.until(batch_id, "completed")
            assert (await second.results(done["output_file_id"])).keys() == set(IDS)
            assert sorted(lines.asked) == sorted(IDS)
            listed = (await second.client.get("/v1/files?purpose=batch_output")).json()
            assert [each["id"] for each in listed["data"]] == [done["output_file_id"]]


async def test_one_of_many_servers_works_on_a_batch(tmp_path: Path, lines: Lines) -> None:
    async with kept(tmp_path, lines) as a, kept(tmp_path, lines), kept(tmp_path, lines) as c:
        names = [await each.create(*IDS) for each in (a, c, a, c)]
        for name in names:
            await a.until(name, "completed")
    assert sorted(lines.asked) == sorted(IDS * 4)


async def test_an_input_that_is_gone_fails_its_batch(tmp_path: Path, lines: Lines) -> None:
    async with kept(tmp_path, lines, runs=False) as server:
        batch_id = await server.create("a")
        file_id = (await server.batch(batch_id))["input_file_id"]
        assert (await server.client.delete(f"/v1/files/{file_id}")).json()["deleted"]
    async with kept(tmp_path, lines) as server:
        done = await server.until(batch_id, "failed")
    assert done["errors"]["data"][0]["code"] == "invalid_input_file"
