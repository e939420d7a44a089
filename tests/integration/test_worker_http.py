"""A real worker under real HTTP clients: what is answered, and what is refused how."""

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, running_worker, stream_events
from prometheus_client.parser import text_string_to_metric_families
from unit.worker.api.tiny import write_checkpoint

FLAGS = (
    *("--max-num-seqs", "8", "--num-gpu-blocks-override", "256", "--max-model-len", "2048"),
    *("--max-body-bytes", "200000", "--receive-timeout", "1", "--write-timeout", "2"),
    *("--connection-max-age", "4", "--slo-ttft-ms", "333", "--slo-itl-ms", "33"),
)


RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running_worker(tmp_path_factory.mktemp("http"), *FLAGS) as worker:
        yield worker


def post(worker: Worker, **fields: Any) -> httpx.Response:
    body = {"prompt": "def add(a, b):", "max_tokens": 5, "temperature": 0, **fields}
    return httpx.post(worker.url + "/v1/completions", json=body, timeout=60)


def test_the_curl_line_of_the_readme_generates_text(worker: Worker) -> None:
    url = worker.url
    if curl := shutil.which("curl"):
        line = [curl, "-sS", "-X", "POST", f"{url}/generate", "-d", '{"prompt": "..."}']
        answer = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)
    else:  # what curl sends
        kind = {"content-type": "application/x-www-form-urlencoded"}
        answer = httpx.post(url + "/generate", content='{"prompt": "..."}', headers=kind).json()
    assert isinstance(answer["generated_text"], str)
    assert answer["usage"]["completion_tokens"] >= 1


def test_generate_reads_the_fields_of_text_generation_inference(worker: Worker) -> None:
    body = {"inputs": "def", "parameters": {"max_new_tokens": 3, "do_sample": False}}
    answer = httpx.post(worker.url + "/generate", json=body).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_an_empty_model_is_the_one_that_is_served(worker: Worker) -> None:
    assert post(worker, model="").status_code == 200
    assert post(worker, model="other").status_code == 404


def test_a_stream_carries_the_tokens_of_the_whole_reply(worker: Worker) -> None:
    whole = post(worker, max_tokens=40, return_token_ids=True, ignore_eos=True).json()
    options = {"include_usage": True}
    body = post(
        worker,
        max_tokens=40,
        return_token_ids=True,
        ignore_eos=True,
        stream=True,
        stream_options=options,
    ).text
    *events, done = stream_events(body)
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    picked = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert len(picked) == 40
    assert "".join(choice["text"] for choice in picked) == whole["choices"][0]["text"]
    assert [i for c in picked for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert picked[-1]["finish_reason"] == "length"
    assert all(choice["finish_reason"] is None for choice in picked[:-1])


def test_text_and_token_ids_of_a_prompt_give_the_same_answer(worker: Worker) -> None:
    first = post(worker, return_token_ids=True).json()["choices"][0]
    again = post(worker, prompt=first["prompt_token_ids"]).json()["choices"][0]
    assert again["text"] == first["text"]


def test_lists_of_prompts_and_n_give_one_choice_each(worker: Worker) -> None:
    answer = post(worker, prompt=["def a", "def b"], n=2, temperature=1.0, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 20
    streamed = stream_events(post(worker, prompt=["def a", "def b"], n=2, stream=True).text)
    assert {json.loads(event)["choices"][0]["index"] for event in streamed[:-1]} == {0, 1, 2, 3}


def test_every_chunk_tells_the_usage_of_its_own_choice_and_the_last_that_of_all(
    worker: Worker,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": ["def a", "def add(a, b):"], "n": 2, "ignore_eos": True}
    body = post(worker, **asked, stream=True, stream_options=options).text
    *chunks, last = [json.loads(event) for event in stream_events(body)[:-1]]
    lengths = []
    for index in range(4):
        told = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in told] == [1, 2, 3, 4, 5]
        (length,) = {usage["prompt_tokens"] for usage in told}
        assert [usage["total_tokens"] - length for usage in told] == [1, 2, 3, 4, 5]
        lengths.append(length)
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
    assert last["usage"]["completion_tokens"] == 20
    assert last["usage"]["prompt_tokens"] == lengths[0] + lengths[2]


def test_a_seed_makes_sampling_repeatable(worker: Worker) -> None:
    fields = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    texts = [post(worker, seed=seed, **fields).json()["choices"] for seed in (11, 11, 12)]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_text_before_it_and_frees_the_sequence(worker: Worker) -> None:
    whole = post(worker, max_tokens=60, ignore_eos=True).json()["choices"][0]["text"]
    stop = whole[10:13]
    answer = post(worker, max_tokens=2000, ignore_eos=True, stop=[stop]).json()["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    worker.until_metric(RUNNING, 0)


def test_what_an_openai_client_sends_by_default_is_accepted(worker: Worker) -> None:
    neutral = {"top_p": 1.0, "logprobs": None, "repetition_penalty": 1.0, "presence_penalty": 0}
    answer = post(worker, model="tiny", n=1, best_of=1, user="somebody", unheard_of=1, **neutral)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b'{"prompt": "\xff"}', 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
        (b'{"prompt": [[1, NaN]]}', 400, "prompt"),
        (b'{"prompt": "x", "logit_bias": {"5": -Infinity}}', 400, "logit_bias"),
        (b'{"prompt": "x", "temperature": -1}', 400, "temperature"),
        (b'{"prompt": "x", "prompt": "y"}', 400, "prompt"),
        (b'{"prompt": "\\ud800"}', 400, "prompt"),
        (b'{"prompt": {}}', 400, "prompt"),
        (b'{"prompt": ""}', 400, "prompt"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [999999]}', 400, "prompt"),
        (b"{}", 400, "prompt"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 9223372036854775808}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 2049}', 400, "max_tokens"),
        (b'{"prompt": "x", "n": 1000000}', 400, "n"),
        (b'{"prompt": "x", "top_p": 0}', 400, "top_p"),
        (b'{"prompt": "x", "logprobs": 21}', 400, "logprobs"),
        (b'{"prompt": "x", "logit_bias": {"999999": 1}}', 400, "logit_bias"),
        (b'{"prompt": "x", "suffix": "y"}', 400, "suffix"),
        (b'{"prompt": "x", "model": "another"}', 404, "model"),
    ],
)
def test_bad_requests_are_refused_by_name(
    worker: Worker, body: bytes, status: int, param: str | None
) -> None:
    answer = httpx.post(worker.url + "/v1/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, param)
    assert error["message"]


def test_a_prompt_over_the_window_is_refused_and_the_next_one_runs(worker: Worker) -> None:
    for length, status in ((2047, 200), (2048, 400), (2049, 400)):
        answer = post(worker, prompt=[5] * length, max_tokens=1)
        assert answer.status_code == status, answer.text
    assert post(worker, max_tokens=1).status_code == 200


def test_an_answer_is_no_longer_than_the_room_behind_its_prompt(worker: Worker) -> None:
    told = post(worker, prompt=[5] * 2040, max_tokens=2048, ignore_eos=True).json()
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 8


def test_an_answers_id_is_the_requests(worker: Worker) -> None:
    """As vLLM's; but a body's own id is not overruled by what a proxy puts on every request."""
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
    for own, told in (({}, "run 7"), ({"request_id": "mine/1"}, "mine/1")):
        headers = {"x-request-id": "run 7"}
        answer = httpx.post(worker.url + "/v1/completions", json=asked | own, headers=headers)
        assert answer.json()["id"] == f"cmpl-{told}"
    answer = post(worker)
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_a_target_may_be_a_whole_url(worker: Worker) -> None:
    url = httpx.URL(worker.url)

    def status(target: str) -> int:
        with contextlib.closing(http.client.HTTPConnection(url.host, url.port)) as connection:
            connection.request("GET", target)
            return connection.getresponse().status

    assert status("http://somewhere/v1/models") == status("https://x:1/v1/models?a=b") == 200
    assert status("http://somewhere") == 404
    assert status("HTTPS://x:1/v1/models") == status("ftp://somewhere/v1/models") == 400


def test_unknown_routes_and_methods_get_the_same_error_body(worker: Worker) -> None:
    assert httpx.get(worker.url + "/nowhere").json()["error"]["code"] == 404
    assert httpx.get(worker.url + "/v1/completions").json()["error"]["code"] == 405


def test_a_body_over_the_cap_is_answered_413_without_reading_it_all(worker: Worker) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port or 0)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000\r\n\r\n"
        )
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_over_the_cap_is_answered_413(worker: Worker) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    answer = httpx.post(worker.url + "/v1/completions", content=chunks())
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"


def test_a_body_in_tiny_chunks_is_refused_and_others_are_served(worker: Worker) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port or 0)) as client:
        client.sendall(head + b"1\r\n \r\n" * 10_000)
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the body's chunks are smaller than 64 bytes on average" in answer
    assert post(worker).status_code == 200


def test_contradicting_lengths_and_encodings_are_refused(worker: Worker) -> None:
    headers = {"content-encoding": "gzip"}
    answer = httpx.post(worker.url + "/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 400
    both = b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port or 0)) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\n" + both + b"\r\n2\r\n{}\r\n0\r\n\r\n"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_headers_that_do_not_end_are_closed_on_a_connection_that_was_used(worker: Worker) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port or 0)) as client:
        client.settimeout(10)
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET / HT")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""


@pytest.mark.parametrize("sent", [b"POST /gen", b"POST /generate HTTP/1.1\r\nContent-Le"])
def test_headers_that_do_not_end_are_closed_at_the_deadline(worker: Worker, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port or 0)) as client:
        client.settimeout(10)
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):  # closed as well
            assert client.recv(100) == b""


def test_a_body_that_does_not_end_is_answered_408_at_the_deadline(worker: Worker) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port or 0)) as client:
        client.settimeout(10)
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_slow_reader_of_a_large_answer_gets_all_of_it(worker: Worker) -> None:
    body = {"prompt": "def", "max_tokens": 1900, "ignore_eos": True, "logprobs": 5, "n": 4}
    with httpx.stream("POST", worker.url + "/v1/completions", json=body, timeout=60) as answer:
        size, began_s, parts = int(answer.headers["content-length"]), time.monotonic(), []
        for part in answer.iter_raw(chunk_size=size // 40):
            parts.append(part)
            # Twice the deadline, and the sockets' buffers hold less than the answer.
            ahead_s = began_s + len(parts) * 0.12 - time.monotonic()
            time.sleep(max(0.0, ahead_s))
    assert len(b"".join(parts)) == size
    assert len(json.loads(b"".join(parts))["choices"]) == 4


def test_a_text_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", max_position=4096)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    with running_worker(tmp_path, *FLAGS, model=model) as worker:
        answer = post(worker, prompt="z")
    assert answer.status_code == 400
    assert "is outside the vocabulary of 64" in answer.json()["error"]["message"]


def test_request_ids_are_echoed_and_old_connections_are_closed(worker: Worker) -> None:
    with httpx.Client(base_url=worker.url) as client:
        answer = client.get("/version", headers={"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert "connection" not in answer.headers
        end_s = time.monotonic() + 10
        while "connection" not in answer.headers:
            assert time.monotonic() < end_s
            answer = client.get("/version")
        assert answer.headers["connection"] == "close"


async def test_connections_live_a_tenth_as_long_while_requests_wait(worker: Worker) -> None:
    body = {"prompt": "def", "max_tokens": 2000, "ignore_eos": True, "n": 8}
    async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await asyncio.to_thread(worker.until_metric, "vllm:num_requests_waiting", 8)
        async with httpx.AsyncClient(base_url=worker.url) as other:
            made_s = time.monotonic()
            while "connection" not in (answer := await other.get("/version")).headers:
                assert time.monotonic() < made_s + 2, "of 4 s and a quarter more or less"
            assert answer.headers["connection"] == "close"
            assert time.monotonic() > made_s + 0.3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(worker.until_metric, "sluice_open_requests", 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_sequences(worker: Worker, stream: bool) -> None:
    body = {"prompt": "def", "max_tokens": 2000, "ignore_eos": True, "stream": stream, "n": 4}
    async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await asyncio.to_thread(worker.until_metric, RUNNING, 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(worker.until_metric, RUNNING, 0, 5)
        await asyncio.to_thread(worker.until_metric, "sluice_open_requests", 0)
        integrity = await client.get(worker.admin_url + "/v1/integrity")
    assert integrity.json() == {"problem": None}


async def test_many_clients_that_leave_at_any_moment_leak_no_block(worker: Worker) -> None:
    body = {"prompt": "def", "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def visit(pause_s: float) -> None:
        async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=body), pause_s)

    await asyncio.gather(*(visit(0.02 * i) for i in range(60)))
    await asyncio.to_thread(worker.until_metric, "sluice_open_requests", 0)
    await asyncio.to_thread(worker.until_metric, "vllm:kv_cache_usage_perc", 0)
    async with httpx.AsyncClient() as client:
        integrity = await client.get(worker.admin_url + "/v1/integrity")
    assert integrity.json() == {"problem": None}


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"stream": True, "return_token_ids": True, "n": 8}, ""),
        ({"logprobs": 20, "n": 6}, "Connection: close\r\n"),
    ],
    ids=["a stream", "a last answer"],
)
def test_a_reader_that_stops_reading_is_cut_and_others_go_on(
    worker: Worker, fields: dict[str, Any], more: str
) -> None:
    before = worker.metric("sluice_connections_cut_total")
    asked = {"prompt": "def", "max_tokens": 2000, "ignore_eos": True, **fields}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", httpx.URL(worker.url).port or 0))
        client.sendall(head.encode() + body)
        assert post(worker).status_code == 200
        worker.until_metric("sluice_connections_cut_total", before + 1, 60)
    worker.until_metric(RUNNING, 0)


def test_metrics_parse_and_carry_the_names_that_dashboards_read(worker: Worker) -> None:
    post(worker)
    families = {
        family.name: family
        for family in text_string_to_metric_families(httpx.get(worker.url + "/metrics").text)
    }
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert families[f"vllm:{name}"].type == "gauge"
        assert families[f"vllm:{name}"].samples[0].labels == {"model_name": "tiny", "engine": "0"}
    ttft = families["vllm:time_to_first_token_seconds"]
    assert ttft.type == "histogram"
    edges = {sample.labels.get("le") for sample in ttft.samples}
    assert {"0.333", "0.25", "2560.0", "+Inf"} <= edges
    assert families["vllm:generation_tokens"].samples[0].value > 0
    assert families["sluice_cap"].samples[0].value == 8
    assert not any("epoch" in s.labels for family in families.values() for s in family.samples)


def test_random_model_names_make_no_metric_series(worker: Worker) -> None:
    before = len(httpx.get(worker.url + "/metrics").text.splitlines())
    for i in range(50):
        assert post(worker, model=f"m{i}").status_code == 404
    assert len(httpx.get(worker.url + "/metrics").text.splitlines()) == before


def test_answers_are_counted_by_route_and_a_client_makes_no_series(worker: Worker) -> None:
    def answered(**labels: str) -> float:
        page = httpx.get(worker.admin_url + "/metrics").text
        (family,) = (f for f in text_string_to_metric_families(page) if f.name == "http_requests")
        return sum(s.value for s in family.samples if labels.items() <= s.labels.items())

    ok = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    before, strange = answered(**ok), answered(handler="none", method="other", status="4xx")
    assert post(worker, max_tokens=1).status_code == 200
    for i in range(3):
        assert httpx.request(f"BREW{i}", f"{worker.url}/pot{i}").status_code == 405
    assert answered(**ok) == before + 1
    assert answered(handler="none", method="other", status="4xx") == strange + 3


def test_an_answer_carries_the_load_for_a_gateway_that_asks(worker: Worker) -> None:
    body, asks = {"prompt": "x", "max_tokens": 1}, {"endpoint-load-metrics-format": "TEXT"}
    told = httpx.post(worker.url + "/v1/completions", json=body, headers=asks).headers
    assert "num_requests_waiting=0" in told["endpoint-load-metrics"]
    assert "endpoint-load-metrics" not in httpx.get(worker.url + "/load").headers


def test_models_are_listed_with_a_slash_behind_too(worker: Worker) -> None:
    plain = httpx.get(worker.url + "/v1/models").json()
    assert plain["object"] == "list"
    assert httpx.get(worker.url + "/v1/models/").json() == plain


def test_models_load_and_health_answer_as_vllm_does(worker: Worker) -> None:
    card = httpx.get(worker.url + "/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    assert httpx.get(worker.url + "/load").json() == {"server_load": 0}
    assert httpx.get(worker.url + "/health").status_code == 200
    assert httpx.get(worker.url + "/readyz").json()["status"] == "ready"


def test_no_request_of_this_module_left_a_traceback(worker: Worker) -> None:
    assert "Traceback" not in worker.log.read_text()
    assert [event for event in worker.events() if event["level"] in ("error", "critical")] == []
