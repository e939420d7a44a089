"""Deadlines, the caps of the queue and speculation of a real worker with one place."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import POLL_S, Worker, running_worker
from sluice_frontend.serving.admission import MAX_ON_THEIR_WAY

LONG = {"prompt": "x", "max_tokens": 3800, "ignore_eos": True, "temperature": 1.0, "seed": 1}
GREEDY = {"prompt": "def f():\n" * 4, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}


ONE_PLACE = (
    *("--max-num-seqs", "1", "--num-gpu-blocks-override", "256", "--speculative-config"),
    '{"method": "ngram", "num_speculative_tokens": 4}',
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running_worker(tmp_path_factory.mktemp("deadlines"), *ONE_PLACE) as worker:
        yield worker


def post(worker: Worker, body: dict[str, Any], **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(worker.url + "/v1/completions", json=body, headers=headers, timeout=60)


def test_a_waiting_request_is_dropped_once_its_deadline_is_out_of_reach(tmp_path: Path) -> None:
    """By a new worker: nothing is known yet that it could be refused for on arrival."""
    with running_worker(tmp_path, *ONE_PLACE) as worker, ThreadPoolExecutor(3) as pool:
        before = [pool.submit(post, worker, {**LONG, "max_tokens": 1900}) for _ in range(3)]
        worker.until_metric("vllm:num_requests_running", 1)
        dropped = post(worker, {**SHORT, "slo_ttft_ms": 100})
        assert not all(request.done() for request in before)
        assert (dropped.status_code, dropped.json()["error"]["reason"]) == (
            429,
            "deadline_unreachable",
        )
        assert "was dropped" in dropped.json()["error"]["message"]
        assert [request.result().status_code for request in before] == [200] * 3
        assert worker.metric("sluice_open_requests") == 0


@pytest.fixture
def busy(worker: Worker) -> Iterator[Worker]:
    """The only place is taken, and how long that lasts is known from a request before."""
    assert post(worker, LONG).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, worker, LONG)
        worker.until_metric("vllm:num_requests_running", 1)
        yield worker
        answer = running.result()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_a_deadline_that_cannot_be_met_is_refused_with_the_predicted_wait(busy: Worker) -> None:
    refused = post(busy, SHORT, x_slo_ttft_ms="1")
    assert busy.metric("vllm:num_requests_running") == 1
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["reason"] == "deadline_unreachable"
    tokens = post(busy, {**SHORT, "slo_tpot_ms": 0.001})
    assert (tokens.status_code, tokens.json()["error"]["reason"]) == (429, "deadline_unreachable")
    assert post(busy, {**SHORT, "slo_ttft_ms": 60_000}).status_code == 200
    assert post(busy, SHORT, x_slo_ttft_ms="never").status_code == 400


def test_an_idle_worker_lets_in_who_shows_whether_its_forecast_is_right(worker: Worker) -> None:
    worker.until_metric("sluice_open_requests", 0)
    assert post(worker, {**SHORT, "slo_tpot_ms": 0.001}).status_code == 200


def test_a_client_that_asks_for_too_much_misses_no_target(busy: Worker) -> None:
    with _targets(busy, ttft_ms=600_000, e2e_ms=600_000):
        last = max((tick["seq"] for tick in _ticks(busy, 0)), default=0)
        for headers in ({"x_slo_ttft_ms": "1"}, {"x_slo_tpot_ms": "0.001"}):
            assert post(busy, SHORT, **headers).status_code == 429
        ticks: list[dict[str, Any]] = []
        end_s = time.monotonic() + 20
        while sum(tick["refused"] for tick in ticks) < 2:
            assert time.monotonic() < end_s
            time.sleep(POLL_S)
            ticks = _ticks(busy, last)
    assert [tick["ttft"]["over"] + tick["e2e"]["over"] for tick in ticks] == [0] * len(ticks)


@contextmanager
def _targets(worker: Worker, **slo: int) -> Iterator[None]:
    """`slo` in force, and none behind it."""
    url = worker.admin_url + "/v1/runtime_config"
    epoch = httpx.get(url).json()["epoch"]
    try:
        httpx.patch(url, json={"epoch": epoch, "slo": slo}).raise_for_status()
        yield
    finally:
        httpx.patch(url, json={"epoch": epoch, "slo": {}}).raise_for_status()


def _ticks(worker: Worker, after: int) -> list[dict[str, Any]]:
    answer = httpx.get(f"{worker.admin_url}/v1/evidence?after={after}").json()
    ticks: list[dict[str, Any]] = answer["ticks"]
    return ticks


@pytest.mark.parametrize(
    ("limit", "most"), [("max_num_queued_reqs", 1), ("max_num_queued_tokens", 40)]
)
def test_what_waits_is_bounded_and_the_refusal_names_the_bound(
    tmp_path: Path, limit: str, most: int
) -> None:
    flags = ("--max-num-seqs", "1", f"--{limit.replace('_', '-')}={most}")
    with running_worker(tmp_path, *flags) as worker, ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, worker, LONG)
        worker.until_metric("vllm:num_requests_running", 1)
        waiting = pool.submit(post, worker, {**SHORT, "prompt": [1] * 40})
        worker.until_metric("vllm:num_requests_waiting", 1)
        refused = post(worker, SHORT)
        assert not running.done()
        assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "queue_full")
        assert f"{limit} is {most}" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert [request.result().status_code for request in (running, waiting)] == [200, 200]
        assert post(worker, SHORT).status_code == 200


def test_speculation_shows_in_vllms_metrics_and_not_in_the_text(worker: Worker) -> None:
    names = ["generation_tokens_total", "time_to_first_token_seconds_count"]
    names += ["spec_decode_num_accepted_tokens_total", "inter_token_latency_seconds_count"]
    before = [worker.metric(f"vllm:{name}") for name in names]
    greedy, again = (post(worker, GREEDY).json()["choices"][0]["text"] for _ in range(2))
    assert greedy == again
    drafted = worker.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = worker.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert drafted >= accepted > 0
    assert worker.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert worker.metric("vllm:spec_decode_num_drafts_total") > 0
    after = [worker.metric(f"vllm:{name}") for name in names]
    tokens, firsts, extra, gaps = (b - a for a, b in zip(before, after, strict=True))
    assert gaps == tokens - firsts - extra  # one for each step, not for each token


def test_more_requests_than_may_run_and_wait_are_refused_before_their_bodies_are_read(
    tmp_path: Path,
) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    flags = ("--max-num-seqs", "2", "--max-num-queued-reqs", "3")
    with running_worker(tmp_path, *flags) as worker, ExitStack() as clients:
        address = ("127.0.0.1", httpx.URL(worker.url).port)

        def begin(path: bytes = b"/v1/completions") -> socket.socket:
            client = clients.enter_context(socket.create_connection(address, timeout=10))
            client.sendall(head % path)
            return client

        refused = "vllm:admission_rejections_total"
        most = worker.metric("sluice_cap_ceiling") + 3 + MAX_ON_THEIR_WAY
        for _ in range(int(most)):
            begin()
        assert worker.metric(refused) == 0
        answer = httpx.Response(200)
        end_s = time.monotonic() + 10
        while answer.status_code == 200:  # until all of the others were heard
            assert time.monotonic() < end_s
            answer = post(worker, SHORT)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert begin().recv(65536).startswith(b"HTTP/1.1 429 ")
        assert worker.metric(refused) == 2
        page = httpx.get(worker.admin_url + "/metrics").text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 2' in page
        assert httpx.post(worker.url + "/tokenize", json={"prompt": "x"}).status_code == 200
        answer = httpx.Response(200)
        while answer.status_code == 200:  # texts to be tokenized are bounded by themselves
            assert time.monotonic() < end_s
            begin(b"/tokenize")
            answer = httpx.post(worker.url + "/tokenize", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert worker.metric(refused) == 2
        clients.close()
        end_s += 10
        while post(worker, SHORT).status_code != 200:
            assert time.monotonic() < end_s
        while sum(tick["refused"] for tick in _ticks(worker, 0)) < 2:
            assert time.monotonic() < end_s
            time.sleep(POLL_S)
