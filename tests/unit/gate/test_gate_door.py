"""The door of a real gate: what strangers send, and what of it an engine ever sees."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from integration.worker_process import Worker, gate_of
from unit.gate.recording import Engine, engine, exchange

HOST = "host: gate\r\nconnection: close\r\n"


@pytest.fixture(scope="module")
def made() -> Iterator[Engine]:
    with engine() as found:
        yield found


@pytest.fixture(scope="module")
def open_gate(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with gate_of(made.url, tmp_path_factory.mktemp("open")) as found:
        yield found


@pytest.fixture(scope="module")
def keyed_gate(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("keyed")
    (directory / "keys").write_text("one\ntwo\n")
    with gate_of(made.url, directory, "--api-key-file", str(directory / "keys")) as found:
        yield found


def completion(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "a", **fields}).encode()


@pytest.mark.parametrize(
    "target",
    [
        *("@127.0.0.1:9/x", ":99/x", ".x/", "x", "%2Fversion", "*", "ftp://h/x", "//127.0.0.1/x"),
        *("http://127.0.0.1:9/x", "/v1/completions#a", "/a/../v1/completions", "/v1/x%00"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_target_that_is_no_path_of_ours_is_answered_400(
    made: Engine, open_gate: Worker, target: str, method: str
) -> None:
    made.received.clear()
    status, answer = exchange(open_gate.url, f"{method} {target} HTTP/1.1\r\n{HOST}\r\n")
    assert status == 400
    assert b'"code":"invalid_request"' in answer or b"BadRequestError" in answer
    assert not made.received
    assert "Traceback" not in open_gate.log.read_text()


def test_the_admin_port_is_out_of_reach_of_clients(made: Engine, open_gate: Worker) -> None:
    port = open_gate.admin_url.rpartition(":")[2]
    patch = b'{"epoch": 1, "cap": 1}'
    head = f"PATCH @127.0.0.1:{port}/v1/runtime_config HTTP/1.1\r\n{HOST}"
    status, _ = exchange(open_gate.url, f"{head}content-length: {len(patch)}\r\n\r\n", patch)
    assert status == 400
    assert httpx.get(f"{open_gate.admin_url}/v1/runtime_config").json()["cap"] > 1


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("/v1%2Fcompletions?a=%23", "/v1/completions?a=%23"),
        ("http://gate/%76ersion", "/version"),
        ("/a%20b", "/a%20b"),
    ],
)
def test_the_engine_gets_the_target_in_the_form_that_was_read(
    made: Engine, open_gate: Worker, target: str, seen: str
) -> None:
    made.received.clear()
    status, _ = exchange(open_gate.url, f"GET {target} HTTP/1.1\r\n{HOST}\r\n")
    assert status == 200
    assert [each.target for each in made.received] == [seen]


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "post", "BREW"])
def test_a_method_that_no_engine_has_is_answered_405(
    made: Engine, open_gate: Worker, method: str
) -> None:
    made.received.clear()
    assert exchange(open_gate.url, f"{method} /x HTTP/1.1\r\n{HOST}\r\n")[0] == 405
    assert not made.received


@pytest.mark.parametrize(
    "line",
    [
        *("POST /%76ersion", "GET http://gate/version", "POST /version", "GET /version"),
        *("POST /healthz", "PUT /readyz", "OPTIONS /v1/completions", "POST /v1/completions"),
        *("GET /metrics", "GET /%6detrics"),
    ],
)
def test_nothing_without_a_key_reaches_the_engine(
    made: Engine, keyed_gate: Worker, line: str
) -> None:
    made.received.clear()
    assert exchange(keyed_gate.url, f"{line} HTTP/1.1\r\n{HOST}content-length: 0\r\n\r\n")[0] == 401
    assert not made.received


@pytest.mark.parametrize("line", ["GET /healthz", "HEAD /readyz", "GET /%68ealth"])
def test_probes_answer_without_a_key(keyed_gate: Worker, line: str) -> None:
    assert exchange(keyed_gate.url, f"{line} HTTP/1.1\r\n{HOST}\r\n")[0] in (200, 405)


def test_a_key_of_the_gate_ends_at_the_gate(made: Engine, keyed_gate: Worker) -> None:
    made.received.clear()
    headers = {"authorization": "Bearer two", "x-kept": "1"}
    answer = httpx.post(f"{keyed_gate.url}/v1/completions", content=completion(), headers=headers)
    assert answer.status_code == 200
    assert made.received[0].headers["x-kept"] == "1"
    assert not [each for each in made.received[0].headers.values() if "two" in each]


def test_authorization_passes_where_the_gate_has_no_keys(made: Engine, open_gate: Worker) -> None:
    made.received.clear()
    headers = {"authorization": "Bearer engines-own"}
    httpx.post(f"{open_gate.url}/v1/completions", content=completion(), headers=headers)
    assert made.received[0].headers["authorization"] == "Bearer engines-own"


def test_headers_of_a_connection_end_with_it(made: Engine, open_gate: Worker) -> None:
    made.received.clear()
    head = "GET /x HTTP/1.1\r\nhost: gate\r\nconnection: close, x-mine\r\nx-mine: 1\r\nte: gzip\r\n"
    exchange(open_gate.url, head + "x-kept: 1\r\n\r\n")
    headers = made.received[0].headers
    assert headers["x-kept"] == "1"
    assert not {"x-mine", "te"} & set(headers)
    assert made.url.endswith(headers["host"])


def test_a_header_with_a_control_character_is_answered_400(made: Engine, open_gate: Worker) -> None:
    made.received.clear()
    status, _ = exchange(open_gate.url, f"GET /x HTTP/1.1\r\n{HOST}x-odd: a\x12b\r\n\r\n")
    assert status == 400
    assert not made.received
    assert "Traceback" not in open_gate.log.read_text()


def test_a_header_reaches_the_engine_as_its_bytes_are(made: Engine, open_gate: Worker) -> None:
    made.received.clear()
    sent = "Grüße".encode().decode("latin-1")
    exchange(open_gate.url, f"GET /x HTTP/1.1\r\n{HOST}x-title: {sent}\r\n\r\n")
    assert made.received[0].headers["x-title"] == sent


def test_a_request_has_one_id_all_the_way(made: Engine, open_gate: Worker) -> None:
    for sent in ({}, {"x-request-id": "mine"}):
        made.received.clear()
        answer = httpx.get(f"{open_gate.url}/x", headers=sent)
        assert made.received[0].headers["x-request-id"] == answer.headers["x-request-id"]
        assert answer.headers["x-request-id"] == sent.get(
            "x-request-id", answer.headers["x-request-id"]
        )


def test_an_id_that_the_engine_gave_reaches_the_client(made: Engine, open_gate: Worker) -> None:
    made.more = {"x-request-id": "engines"}
    try:
        assert httpx.get(f"{open_gate.url}/x").headers.get_list("x-request-id") == ["engines"]
    finally:
        made.more = {}


def test_the_engines_own_answers_to_browsers_stay(made: Engine, open_gate: Worker) -> None:
    made.more = {
        "access-control-allow-origin": "https://page.example",
        "access-control-allow-credentials": "true",
    }
    try:
        headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
        answer = httpx.options(f"{open_gate.url}/v1/completions", headers=headers)
        assert {**answer.headers, **made.more} == dict(answer.headers)
    finally:
        made.more = {}


def test_origins_of_the_gate_are_its_flag(made: Engine, tmp_path: Path) -> None:
    with gate_of(made.url, tmp_path, '--allowed-origins=["https://page.example"]') as found:
        headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
        answer = httpx.options(f"{found.url}/v1/completions", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/completion"])
def test_a_body_with_two_readings_never_reaches_the_engine(
    made: Engine, open_gate: Worker, path: str
) -> None:
    made.received.clear()
    for body in (b'{"n": 1, "n": 6}', b'{"N": 6}', b'\xef\xbb\xbf{"n": 6}', b'{"n": 6'):
        assert httpx.post(open_gate.url + path, content=body).status_code == 400
    assert not made.received


def test_a_compressed_body_goes_as_it_is(made: Engine, open_gate: Worker) -> None:
    made.received.clear()
    body, headers = gzip.compress(completion()), {"content-encoding": "gzip"}
    answer = httpx.post(f"{open_gate.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200
    assert made.received[0].body == body
    assert made.received[0].headers["content-encoding"] == "gzip"


def test_an_ollama_gets_the_fields_and_routes_of_one_model(made: Engine, tmp_path: Path) -> None:
    flags = ("--engine", "ollama", "--served-model-name", "m")
    with gate_of(made.url, tmp_path, *flags) as found:
        made.received.clear()
        for path in ("/api/pull", "/api/create", "/api/copy", "/api/push"):
            assert httpx.post(found.url + path, json={"model": "x"}).status_code == 403
        assert httpx.request("DELETE", f"{found.url}/api/delete", json={}).status_code == 403
        refused = httpx.post(f"{found.url}/api/chat", json={"model": "m", "KEEP_ALIVE": 0})
        assert (refused.status_code, set(refused.json())) == (400, {"error"})
        assert httpx.post(f"{found.url}/v1/completions", json={"model": "x"}).status_code == 404
        assert not made.received
        asked = {"model": "m", "messages": [], "keep_alive": "1s"}
        assert httpx.post(f"{found.url}/api/chat", json=asked).status_code == 200
        assert json.loads(made.received[0].body) == {**asked, "keep_alive": -1}


def test_a_large_body_is_read_beside_the_loop(made: Engine, open_gate: Worker) -> None:
    made.received.clear()
    body = completion(prompt="a" * (3 << 20), n=2)
    assert httpx.post(f"{open_gate.url}/v1/completions", content=body).status_code == 200
    assert made.received[0].body == body
    twice = body.removesuffix(b"}") + b', "n": 6}'
    refused = httpx.post(f"{open_gate.url}/v1/completions", content=twice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
