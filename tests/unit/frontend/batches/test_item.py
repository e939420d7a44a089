"""A line of a batch: which is refused and why, which prompts stand together, how results look."""

import json
from typing import Any

import pytest
from sluice_frontend.batches.item import Refusal, check, prefix_of, read_line, served_routes

ROUTES = served_routes()


def line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({k: v for k, v in (whole | changes).items() if v is not None}).encode()


def prefix(**body: Any) -> int:
    return prefix_of(check(read_line(line(body=body)), ROUTES))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{x\n", "it is not JSON"),
        (b'{"custom_id": "a"', "it is not JSON"),
        (b'{"custom_id":' + b"[" * 100_000, "Expected `str`"),
        (b'{"body":' + b"[" * 100_000, "it is not JSON"),
        (b"[]", "Expected `object`"),
        (line().replace(b'"x"', b'"\xff"'), "it is not UTF-8"),
        (line(custom_id=None), "missing required field `custom_id`"),
        (line(custom_id=3), "Expected `str`, got `int` - at `$.custom_id`"),
        (line(custom_id=""), "its custom_id is empty"),
        (line(method="GET"), "its method is 'GET', not POST"),
        (line(url="/v1/videos"), "its url '/v1/videos' is no route that is served"),
        (line(url="http://host/v1/completions"), "is no route that is served"),
        (line(url="/generate_stream"), "is no route that is served"),
        (line(url="/tokenize"), "is no route that is served"),
        (line(url="/v1/\x1b[2J"), r"its url '/v1/\\x1b[2J' is no route"),
        (line(body=None), "missing required field `body`"),
        (line(body=[1]), "its body is not a JSON object"),
        (line(body={"prompt": "x", "stream": True}), "its body asks for a stream"),
    ],
)
def test_a_bad_line_is_refused_with_one_sentence(data: bytes, said: str) -> None:
    with pytest.raises(Refusal) as refusal:
        check(read_line(data), ROUTES)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "url",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/classify", "/v1/score"),
        *("/v1/rerank", "/v1/decisions", "/pooling", "/embed", "/predict", "/generate"),
        *("/v1/responses", "/v1/messages"),
    ],
)
def test_each_route_that_brings_work_may_be_named(url: str) -> None:
    assert read_line(line(url=url)).url in ROUTES


def test_the_body_stays_as_it_is() -> None:
    body = b'{ "temperature":0.10, "n" : 1e0,"stream":false, "x": "\\u00e9\xc3\xa9" }'
    read = read_line(line(body={}).replace(b"{}", body))
    check(read, ROUTES)
    assert bytes(read.body) == body


def test_prompts_that_begin_alike_have_one_prefix() -> None:
    system = {"role": "system", "content": "Be brief."}
    first, second = ([system, {"role": "user", "content": text}] for text in ("a", "b" * 999))
    other = [{"role": "system", "content": "Be long."}, first[1]]
    assert prefix(messages=first) == prefix(messages=second) != prefix(messages=other)
    assert prefix(prompt="p" * 300 + "a") == prefix(prompt="p" * 300 + "b")
    assert prefix(prompt="a" + "p" * 300) != prefix(prompt="b" + "p" * 300)
    assert prefix(model="tiny") == 0
    assert prefix(messages="no list") != 0
