"""The command line before servers and objects that lie: it ends in order, with bounded numbers, and
prints no control character."""

import json
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web
from sluice.__main__ import main
from sluice.measure.client import Outcome, Retry, attempt, request
from sluice.measure.endpoint import (
    EndpointError,
    base_url,
    named_live,
    read_counters,
    scrape,
    served_model,
)
from sluice.serve import Narration
from sluice_core.bounded import MAX_TOKENS
from sluice_frontend.http.logs import EventFormatter
from unit.cli.served import service_under_traffic

HOSTILE = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0)))) + "\u202e\u2066\u2028\u200f\ufeff"
NUMBERS = ("4611686018427387904", "-5", "NaN", "Infinity", "1e400", '"x"', "[]", "true", "null")
USAGES = (*(f'{{"completion_tokens": {value}}}' for value in NUMBERS), "[]", "3", '"x"')
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
DEEP = b"[" * 100_000


class Server:
    """A made-up server on loopback. `pages`: type and body by path, and Retry-After."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str, bytes]] = {}
        self.retry_after = "0"

    async def answer(self, asked: web.Request) -> web.Response:
        status, kind, body = self.pages[asked.path]
        headers = {"Content-Type": kind, "Retry-After": self.retry_after}
        return web.Response(status=status, body=body, headers=headers)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    made, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield made, f"http://{host}:{port}"
    await runner.cleanup()


async def sent(url: str, **body: object) -> Outcome:
    async with aiohttp.ClientSession() as session:
        return await request(session, url + "/v1/completions", body)


@pytest.mark.parametrize("usage", USAGES)
async def test_a_usage_that_is_none_counts_no_tokens(
    server: tuple[Server, str], usage: str
) -> None:
    made, url = server
    body = f'{{"choices": [], "usage": {usage}}}'.encode()
    made.pages["/v1/completions"] = 200, "application/json", body
    whole = await sent(url, stream=False)
    assert (whole.result, whole.num_tokens) == ("cut", 0)
    streamed = EVENT * 2 + b"data: " + body + b"\n\ndata: [DONE]\n\n"
    made.pages["/v1/completions"] = 200, "text/event-stream", streamed
    outcome = await sent(url, stream=True)
    assert 0 < outcome.num_tokens <= 3


@pytest.mark.parametrize(
    "words", [HOSTILE.encode(), b'{"error": "' + HOSTILE.encode() + b'"}', DEEP]
)
async def test_what_a_server_says_of_an_error_is_told_clean(
    server: tuple[Server, str], words: bytes
) -> None:
    made, url = server
    made.pages["/v1/completions"] = 400, "text/plain; charset=hex", words
    assert (await sent(url)).detail.isprintable()
    line = b'data: {"error": ' + words.replace(b"\n", b"") + b"}\n\n"
    made.pages["/v1/completions"] = 200, "text/event-stream", EVENT + line
    assert (await sent(url)).detail.isprintable()


@pytest.mark.parametrize("asked", ["nan", "inf", "-1", "soon", "1e400"])
async def test_a_time_to_wait_that_is_none_is_a_second(
    server: tuple[Server, str], asked: str
) -> None:
    made, url = server
    made.retry_after = asked
    made.pages["/v1/completions"] = 503, "text/plain", b""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(Retry) as told:
            await attempt(session, url + "/v1/completions", {}, 0.0)
    assert told.value.after_s == 1.0


MODELS = [
    *(f'{{"data": [{{"id": "m", "max_model_len": {value}}}]}}'.encode() for value in NUMBERS),
    *(b"[]", b"{}", b"3", b'{"data": [3]}', b'{"data": {}}', b"", b"\xff", DEEP),
]


@pytest.mark.parametrize("body", MODELS)
async def test_a_list_of_models_is_read_or_refused_in_one_sentence(
    server: tuple[Server, str], body: bytes
) -> None:
    made, url = server
    made.pages["/v1/models"] = 200, "application/json; charset=hex", body
    async with aiohttp.ClientSession() as session:
        if b'"id"' not in body:
            with pytest.raises(EndpointError, match=r"^[ -~]+$"):
                await served_model(session, url)
            return
        window = (await served_model(session, url)).window
    assert window is None or 0 <= window <= MAX_TOKENS


async def test_a_models_name_and_a_refusal_are_told_clean(server: tuple[Server, str]) -> None:
    made, url = server
    listed = json.dumps({"data": [{"id": HOSTILE}]}).encode()
    made.pages["/v1/models"] = 200, "application/json", listed
    made.pages["/v1/runtime_config"] = 200, "application/json", b'{"epoch": NaN}'
    async with aiohttp.ClientSession() as session:
        assert (await served_model(session, url)).name.isprintable()
        with pytest.raises(EndpointError) as told:
            await named_live(session, url, None)
    assert str(told.value).isprintable()
    assert EndpointError(HOSTILE).args[0].isprintable()


@pytest.mark.parametrize("word", ["NaN", "+Inf", "-1", "1e300", "x", ""])
async def test_metrics_that_are_no_numbers_are_unknown(
    server: tuple[Server, str], word: str
) -> None:
    made, url = server
    page = f"vllm:generation_tokens_total {word}\nvllm:iteration_tokens_total_count {word}\n"
    assert read_counters(page) is None
    made.pages["/metrics"] = 200, "text/plain; charset=hex", page.encode()
    async with aiohttp.ClientSession() as session:
        assert await scrape(session, base_url(url)) is None


# Objects of a cluster


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl in PATH that prints the file `object`, or for events the file `events`."""
    script = 'case "$*" in *events*) cat "$0.events";; *) cat "$0.object";; esac'
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


def show(kubectl: Path, body: object, events: object = ()) -> None:
    kubectl.with_suffix(".object").write_text(json.dumps(body))
    kubectl.with_suffix(".events").write_text(json.dumps({"items": events}))


def poisoned(value: Any, words: str) -> Any:
    """Each text in it with `words` in its middle, keys too."""
    if isinstance(value, dict):
        return {key: poisoned(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, words) for item in value]
    return f"{value[:1]}{words}{value[1:]}" if isinstance(value, str) else value


def assert_printable(told: str) -> None:
    assert [line for line in told.split("\n") if not line.isprintable()] == []


EVENTS = [{"lastTimestamp": HOSTILE, "reason": HOSTILE, "message": f"a{HOSTILE}\ud800b"}]


def test_a_page_obeys_no_words_of_others(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = service_under_traffic()
    for condition in body["status"]["conditions"]:
        condition["message"] = f"the engine said {HOSTILE}\udc80"
    body["status"]["batching"]["message"] = HOSTILE
    body["status"]["memory"]["measured"] = {HOSTILE: 3}
    body["spec"]["model"]["uri"] += HOSTILE
    show(kubectl, body, EVENTS)
    for command in (["status", "demo"], ["report", "demo"], ["report", "demo", "--json"]):
        main(command)
        told = capsys.readouterr()
        assert told.out or told.err
        assert_printable(told.out + told.err)
    show(kubectl, body, EVENTS)
    assert main(["status", "demo"]) == 0
    assert "the engine said" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["metadata", "spec", "status"])
def test_an_object_of_hostile_words_is_shown_or_refused_in_one_sentence(
    kubectl: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    body = service_under_traffic()
    body[part] = poisoned(body[part], HOSTILE)
    show(kubectl, body, EVENTS)
    for command in ("status", "report"):
        assert main([command, "demo"]) in (0, 2)
        told = capsys.readouterr()
        assert_printable(told.out + told.err)


def numbers_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_of(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from numbers_of(item, (*path, at))
    elif isinstance(value, str | int | float):
        yield path


@pytest.mark.parametrize("value", [10**400, -5, math.nan, math.inf, "nan", "1e400ms", None, []])
def test_a_status_of_hostile_numbers_is_shown_or_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    body = service_under_traffic()
    asked: dict[str, Any] = {}
    monkeypatch.setattr("sluice.kube.Kube.get", lambda *_: asked["body"])
    for path in numbers_of(body["status"]):
        asked["body"] = msgspec.json.decode(msgspec.json.encode(body)) | {"items": []}
        at = asked["body"]["status"]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        for command in ("status", "report"):
            assert main([command, "demo"]) in (0, 2), path
    capsys.readouterr()


@pytest.mark.parametrize("formatter", [EventFormatter(), Narration(cast(Any, None))])
def test_a_line_of_a_log_obeys_no_words_of_others(formatter: logging.Formatter) -> None:
    event = {"msg": "engine died", "levelname": "ERROR", "levelno": logging.ERROR}
    record = logging.makeLogRecord(event | {"reason": f"{HOSTILE}\ud800", "open_requests": 3})
    line = formatter.format(record)
    assert line.isprintable()
    assert "\\x1b" in line or "\\u001b" in line
