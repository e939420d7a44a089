"""An Ollama that serves one model to all: what its clients may ask of it."""

import json
from typing import Any

import pytest
from sluice_core.errors import ModelNotFound, NotOffered, RequestError, UnsupportedParameter
from sluice_gate.request.asked import Asked, Door, read
from sluice_gate.request.ollama import check_route

DOOR = Door("ollama", "m", 1 << 20)


def asked(path: str, door: Door = DOOR, **fields: Any) -> Asked:
    return read(door, path, json.dumps(fields).encode(), {})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("DELETE", "/api/delete"), ("POST", "/api/pull"), ("POST", "/api/create")),
        *(("POST", "/api/copy"), ("POST", "/api/push"), ("HEAD", "/api/blobs/sha256:1")),
        *(("POST", "/api/blobs/sha256:1"), ("PUT", "/api/chat"), ("POST", "/api/Chat")),
        *(("POST", "/api/chat/"), ("POST", "/api/signout"), ("GET", "/api/anything/new")),
    ],
)
def test_routes_that_are_not_listed_are_refused(method: str, path: str) -> None:
    with pytest.raises(NotOffered):
        check_route(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/chat"), ("POST", "/v1/messages"), ("GET", "/api/tags"), ("HEAD", "/")],
)
def test_routes_of_one_model_pass(method: str, path: str) -> None:
    check_route(method, path)


@pytest.mark.parametrize("value", [0, 0.5, "0", "1ns", "1s", "5m", -1, None])
def test_no_time_of_a_client_unloads_the_model(value: object) -> None:
    got = asked("/api/chat", model="m", messages=[], keep_alive=value)
    assert got.body is not None
    assert json.loads(got.body) == {"model": "m", "messages": [], "keep_alive": -1}


def test_a_body_that_needs_no_change_goes_as_it_came() -> None:
    options = {"temperature": 0, "num_predict": 8, "num_ctx": None}
    assert asked("/api/generate", model="m", prompt="a", options=options).body is None


@pytest.mark.parametrize(
    "fields",
    [
        {"KEEP_ALIVE": 0}, {"Keep_Alive": "1s"}, {"keep_alive\u0000": 0}, {"\u212aeep_alive": 0},
        {"Options": {"num_ctx": 1}}, {"options": {"num_ctx": 1}}, {"options": {"num_gpu": 0}},
        {"options": {"low_vram": True}}, {"options": [{"num_ctx": 1}]}, {"adapters": ["x"]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
def test_fields_that_are_not_listed_are_refused(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        asked(path, model="m", **fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"model": "other"}),
        ("/api/show", {"name": "other"}),
        ("/v1/completions", {"model": "other"}),
        ("/v1/messages", {"model": ["m"]}),
        ("/api/generate", {"model": "m:q4"}),
    ],
)
def test_another_models_name_is_refused_on_every_route(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelNotFound):
        asked(path, **fields)


@pytest.mark.parametrize("served", ["m", "m:latest"])
def test_the_served_models_name_has_a_tag_or_none(served: str) -> None:
    for name in ("m", "m:latest"):
        asked("/api/chat", Door("ollama", served, 1 << 20), model=name, messages=[])


def test_openais_routes_keep_fields_that_ollama_ignores() -> None:
    got = asked("/v1/completions", model="m", prompt="a", user="x", options={"num_ctx": None})
    assert got.body is None


def test_the_served_name_is_shown_where_another_was_asked() -> None:
    with pytest.raises(ModelNotFound, match="this server has 'm'"):
        asked("/api/chat", model="\x1b[2J", messages=[])
    with pytest.raises(UnsupportedParameter, match=r"'\\u202e'"):
        read(DOOR, "/api/chat", '{"model": "m", "\u202e": 1}'.encode(), {})
