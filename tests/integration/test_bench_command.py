"""`sluice bench` against a real worker: caps changed live, then put back; and without that port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from integration.worker_process import Worker, running_worker
from sluice.__main__ import main
from sluice.measure import endpoint
from sluice.measure.endpoint import CLIENT_SIDE, LIVE, TOLD, EndpointError, find_live, named_live
from sluice_core.contract import Slo

ADMIN = {"Authorization": "Bearer admin-canary"}
SMALL = [
    *("--wave", "6", "--waves", "2", "--silence", "0", "--prompt-tokens", "8", "24"),
    *("--max-tokens", "4", "12", "--vocab-size", "300", "--slo", "ttft=20s,itl=5s"),
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("bench")
    (directory / "token").write_text("admin-canary\n")
    (directory / "keys").write_text("client-canary\n")
    flags = (
        *("--max-num-seqs", "4", "--initial-num-seqs", "3", "--num-gpu-blocks-override", "256"),
        *("--admin-token-file", str(directory / "token")),
        *("--api-key-file", str(directory / "keys")),
    )
    with running_worker(directory, *flags) as worker:
        yield worker


def bench(worker: Worker, out: Path, *flags: str, admin: bool = True) -> int:
    given = ["--url", worker.url, "--api-key-file", str(worker.log.parent / "keys")]
    if admin:
        token = str(worker.log.parent / "token")
        given += ["--admin-url", worker.admin_url, "--admin-token-file", token]
    return main(["bench", *given, *SMALL, "--out", str(out), *flags])


def config(worker: Worker) -> dict[str, Any]:
    answer = httpx.get(worker.admin_url + "/v1/runtime_config", headers=ADMIN)
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_each_cap_is_measured_live_on_one_server_and_the_first_cap_is_back(
    worker: Worker, tmp_path: Path, route: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config(worker)
    assert bench(worker, tmp_path, "--max-num-seqs", "1,4,64", "--route", route) == 0
    after = config(worker)
    assert (after["cap"], after["boot_id"]) == (3, before["boot_id"])
    assert after["slo"] == before["slo"]
    assert after["epoch"] > before["epoch"] + 4
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["caps_are"], found["left_out"], found["ceiling"]) == (LIVE + TOLD, [64], 4)
    assert [p["cap"] for p in found["points"]] == [1, 4]
    for point in found["points"]:
        assert (point["requests"], point["failed"], point["good_share"]) == (12, 0, 1.0)
        assert 0 < point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"] < point["e2e_ms"]["p99"]
        assert point["static"]["gain"] is not None
    alone, four = found["points"]
    assert alone["effective_batch"] <= 1.0 < four["effective_batch"] <= 4.0
    assert alone["static"]["padding_waste"] == 0.0
    said = capsys.readouterr().out
    assert "round 2 of 2" in said
    assert "cap 3 is in force again, as before" in said
    assert "Recommended cap:" in said


def test_without_the_admin_port_the_cap_is_this_client_s_and_it_says_so(
    worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epoch = config(worker)["epoch"]
    assert bench(worker, tmp_path, "--client-side", "--max-num-seqs", "1,2", admin=False) == 0
    assert config(worker)["epoch"] == epoch
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["caps_are"] == CLIENT_SIDE
    assert all(point["static"]["gain"] is None for point in found["points"])
    alone, two = (point["effective_batch"] for point in found["points"])
    assert alone <= 1.0 < two <= 2.0
    assert "a limit of this client" in capsys.readouterr().out


async def test_a_cap_that_somebody_else_changes_ends_the_measurement_and_stays_theirs(
    worker: Worker,
) -> None:
    async with aiohttp.ClientSession(headers=ADMIN) as session:
        live = await named_live(session, worker.admin_url, None)
        await live.use(2)
        await live.check()
        theirs = {"epoch": config(worker)["epoch"] + 3, "cap": 1}
        url = worker.admin_url + "/v1/runtime_config"
        async with session.patch(url, json=theirs) as answer:
            assert answer.status == 200
        with pytest.raises(EndpointError, match="somebody else"):
            await live.check()
        assert await live.restore() is None
    assert config(worker)["cap"] == 1


async def test_a_cap_whose_answer_was_never_read_is_put_back(worker: Worker) -> None:
    before = config(worker)
    async with aiohttp.ClientSession(headers=ADMIN) as session:
        live = await named_live(session, worker.admin_url, None)
        other = 1 if before["cap"] == 2 else 2
        using = asyncio.create_task(live.use(other))
        for _ in range(1000):
            await asyncio.sleep(0)
            if config(worker)["cap"] == other:  # asked while the loop reads no answer
                break
        assert not using.done()
        using.cancel()
        with suppress(asyncio.CancelledError):
            await using
        assert await live.restore() == before["cap"]
    assert config(worker)["cap"] == before["cap"]


async def test_the_usual_admin_port_is_taken_only_if_it_is_of_the_same_process(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoint, "ADMIN_PORT", int(worker.admin_url.rpartition(":")[2]))
    key = {"Authorization": "Bearer client-canary"}
    with running_worker(tmp_path, "--num-gpu-blocks-override", "256") as another:
        async with (
            aiohttp.ClientSession(headers=key) as api,
            aiohttp.ClientSession(headers=ADMIN) as admin,
        ):
            live = await find_live(api, admin, worker.url, None)
            assert live is not None
            assert live.ceiling == 4
            assert await find_live(api, admin, another.url, None) is None


async def test_the_worker_is_told_the_targets_while_it_is_measured(worker: Worker) -> None:
    before = config(worker)["slo"]
    async with aiohttp.ClientSession(headers=ADMIN) as session:
        asked = Slo(ttft_ms=2000.0, itl_ms=80.0)
        live = await named_live(session, worker.admin_url, asked)
        await live.use(2)
        assert config(worker)["slo"] == {"ttft_ms": 2000.0, "itl_ms": 80.0, "e2e_ms": None}
        await live.restore()
    assert config(worker)["slo"] == before


async def test_only_an_admin_port_of_ours_is_taken_for_one(worker: Worker) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EndpointError, match="--admin-token-file"):
            await named_live(session, worker.admin_url, None)
    async with aiohttp.ClientSession(headers=ADMIN) as session:
        with pytest.raises(EndpointError, match="no admin port answers"):
            await named_live(session, worker.admin_url + "/elsewhere", None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--admin-token-file", "/nowhere"), "/nowhere cannot be read"),
        (("--admin-url", "http://127.0.0.1:9"), "no admin port answers at http://127.0.0.1:9"),
        (("--max-num-seqs", "5,6"), "every cap is over the server's ceiling of 4"),
        (("--prompt-tokens", "9000", "9000"), "over the window of 4096; give --scale"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_and_code_2(
    worker: Worker,
    tmp_path: Path,
    flags: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(worker, tmp_path, *flags) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_bearer_is_told_and_nothing_of_it_is_shown(
    worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong").write_text("wrong-canary")
    wrong = ("--admin-token-file", str(tmp_path / "wrong"))
    assert bench(worker, tmp_path / "out", *wrong) == 2
    shown = capsys.readouterr()
    assert "--admin-token-file" in shown.err
    assert "canary" not in shown.out + shown.err


def test_an_api_that_wants_a_key_gets_that_of_the_file_or_names_the_flag(
    worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", worker.url]) == 2
    assert f"{worker.url} wants its bearer: --api-key-file" in capsys.readouterr().err
    load = ["load", "--url", worker.url + "/", "--model", "tiny", "--phases", "a:burst:1:0.01"]
    load += ["--vocab-size", "300", "--prompt-tokens", "8", "9", "--max-tokens", "2", "4"]
    assert main(load) == 1
    assert "HTTP 401" in capsys.readouterr().out
    assert main([*load, "--api-key-file", str(worker.log.parent / "keys")]) == 0
