"""The admin port of a real worker: live limits, evidence, and who may ask."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, running_worker
from sluice_core.contract import TICK_SECONDS, Evidence, RuntimeConfig, decode

ADMIN = {"authorization": "Bearer admin-canary-7f3a"}
CLIENT = {"authorization": "Bearer client-canary-91bc"}


@contextmanager
def new_pod(directory: Path) -> Iterator[Worker]:
    """A worker whose peers have cap 3 in epoch 5."""
    (directory / "token").write_text("admin-canary-7f3a\n")
    (directory / "keys").write_text("other-key\nclient-canary-91bc\n")
    runtime = directory / "runtime"
    runtime.mkdir()
    (runtime / "cap").write_text("3")
    (runtime / "epoch").write_text("5\n")
    flags = (
        *("--max-num-seqs", "16", "--initial-num-seqs", "7", "--num-gpu-blocks-override", "1024"),
        *("--admin-token-file", str(directory / "token"), "--runtime-config-dir", str(runtime)),
        *("--api-key-file", str(directory / "keys"), "--slo-ttft-ms", "250"),
    )
    with running_worker(directory, *flags) as worker:
        yield worker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with new_pod(tmp_path_factory.mktemp("admin")) as worker:
        yield worker


def config_of(worker: Worker) -> RuntimeConfig:
    answer = httpx.get(worker.admin_url + "/v1/runtime_config", headers=ADMIN)
    return decode(answer.content, RuntimeConfig)


def patch(worker: Worker, **fields: Any) -> httpx.Response:
    return httpx.patch(worker.admin_url + "/v1/runtime_config", json=fields, headers=ADMIN)


def evidence_of(worker: Worker, after: int = 0) -> Evidence:
    params = {"after": after}
    answer = httpx.get(worker.admin_url + "/v1/evidence", params=params, headers=ADMIN)
    return decode(answer.content, Evidence)


def until_closed(worker: Worker) -> int:
    """Wait until everything up to now is in closed ticks; the last tick's number."""
    first, end_s = last_closed(worker), time.monotonic() + 15 * TICK_SECONDS
    while (last := last_closed(worker)) < first + 2:
        assert time.monotonic() < end_s
        time.sleep(0.1)
    return last


def last_closed(worker: Worker) -> int:
    """The number of the last closed tick; 0 before the first."""
    return max((tick.seq for tick in evidence_of(worker).ticks), default=0)


def test_a_new_pod_starts_with_the_cap_and_epoch_of_its_peers(tmp_path: Path) -> None:
    with new_pod(tmp_path) as worker:
        started = config_of(worker)
    assert (started.epoch, started.cap, started.ceiling) == (5, 3, 16)
    assert started.slo.ttft_ms == 250


def test_a_patch_is_in_force_once_and_an_older_one_is_refused(worker: Worker) -> None:
    epoch = config_of(worker).epoch + 1
    changed = patch(worker, epoch=epoch, cap=9, slo={"ttft_ms": 500, "itl_ms": 50})
    assert changed.status_code == 200, changed.text
    effective = decode(changed.content, RuntimeConfig)
    assert (effective.epoch, effective.cap, effective.slo.itl_ms) == (epoch, 9, 50)
    again = patch(worker, epoch=epoch, cap=9, slo={"ttft_ms": 500, "itl_ms": 50})
    assert (again.status_code, again.json()) == (200, changed.json())
    assert patch(worker, epoch=epoch, cap=8).status_code == 409
    older = patch(worker, epoch=epoch - 1, cap=4)
    assert older.status_code == 409
    assert config_of(worker) == effective


def test_a_cap_over_the_ceiling_is_answered_422_in_one_sentence(worker: Worker) -> None:
    epoch = config_of(worker).epoch
    answer = patch(worker, epoch=epoch + 1, cap=17)
    assert answer.status_code == 422
    assert "17" in answer.json()["error"]["message"]
    assert "16" in answer.json()["error"]["message"]
    assert patch(worker, epoch=epoch + 1, max_num_batched_tokens=1 << 20).status_code == 422
    assert config_of(worker).epoch == epoch


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"epoch": -1}',
        b'{"epoch": 99, "cap": 0}',
        b'{"epoch": 99, "cap": 4.5}',
        b'{"epoch": 99, "unknown": 1}',
        b'{"epoch": 99, "epoch": 100}',
        b'{"epoch": 99, "slo": {"ttft_ms": NaN}}',
        b'{"epoch": 99, "slo": {"ttft_ms": -5}}',
        b'{"epoch": 99, "slo": {"itl_ms": 1e308}}',
        b'{"epoch": 100000000000000000000000000, "cap": 4}',
        b'{"epoch": 99, "overload": "Maybe"}',
        b'{"epoch": 99, "scheduling_policy": "lifo"}',
        b'{"epoch": 99, "hold_share": 1.5}',
    ],
)
def test_a_malformed_patch_is_answered_400_and_changes_nothing(worker: Worker, body: bytes) -> None:
    before = config_of(worker)
    url = worker.admin_url + "/v1/runtime_config"
    assert httpx.patch(url, content=body, headers=ADMIN).status_code == 400
    assert config_of(worker) == before


async def test_a_raised_cap_admits_what_waited_for_it_without_a_restart(worker: Worker) -> None:
    epoch = config_of(worker).epoch
    boot_id = config_of(worker).boot_id
    patch(worker, epoch=epoch + 1, cap=2)
    body = {"prompt": "def", "max_tokens": 2600, "ignore_eos": True, "n": 6}
    async with httpx.AsyncClient(headers=CLIENT, timeout=120) as client:
        url = worker.url + "/v1/completions"
        task = asyncio.create_task(client.post(url, json=body))
        await asyncio.to_thread(worker.until_metric, "vllm:num_requests_running", 2)
        await asyncio.to_thread(worker.until_metric, "vllm:num_requests_waiting", 4)
        answer = await asyncio.to_thread(lambda: patch(worker, epoch=epoch + 2, cap=6))
        assert decode(answer.content, RuntimeConfig).waiting.cap == 4
        await asyncio.to_thread(worker.until_metric, "vllm:num_requests_running", 6)
        assert (await task).status_code == 200
    assert config_of(worker).boot_id == boot_id


def test_the_policy_changes_live_and_decides_whether_a_priority_counts(worker: Worker) -> None:
    url, body = worker.url + "/v1/completions", {"prompt": "def", "max_tokens": 2, "priority": -1}

    def ask(**fields: Any) -> tuple[str, int]:
        answer = patch(worker, epoch=config_of(worker).epoch, **fields)
        policy = decode(answer.content, RuntimeConfig).scheduling_policy
        return policy, httpx.post(url, json=body, headers=CLIENT).status_code

    assert ask(slo={"itl_ms": 50}) == ("fcfs", 400)
    assert ask(slo={"ttft_ms": 500}) == ("deadline", 200)
    for policy, status in (("priority", 200), ("deadline", 200), ("fcfs", 400)):
        assert ask(scheduling_policy=policy) == (policy, status)
    refused = httpx.post(url, json=body, headers=CLIENT)
    assert refused.json()["error"]["param"] == "priority"


def test_evidence_counts_every_arrival_once(worker: Worker) -> None:
    after = until_closed(worker)
    body = {"prompt": "def add", "max_tokens": 20, "ignore_eos": True, "stream": True}
    with httpx.Client(headers=CLIENT, timeout=60) as client:
        for _ in range(5):
            assert client.post(worker.url + "/v1/completions", json=body).status_code == 200
    until_closed(worker)
    evidence = evidence_of(worker, after)
    ticks = evidence.ticks
    assert [tick.seq for tick in ticks] == list(range(after + 1, ticks[-1].seq + 1))
    assert sum(tick.arrivals for tick in ticks) == 5
    assert sum(tick.ttft.n for tick in ticks) == 5
    assert sum(tick.finished for tick in ticks) == 5
    assert sum(tick.itl.n for tick in ticks) == 5 * 19
    assert sum(sum(tick.itl.sketch.values()) for tick in ticks) == 5 * 19
    assert sum(tick.generated_tokens for tick in ticks) == 100
    assert sum(tick.steps for tick in ticks) >= 100
    assert evidence.lengths.n >= 5
    assert evidence.memory.kv_tokens > 0


def test_what_one_keys_requests_left_in_the_prefix_cache_is_not_found_by_anothers(
    worker: Worker,
) -> None:
    def cached(headers: dict[str, str], **fields: str) -> int:
        body = {"prompt": [7] * 200, "max_tokens": 1, **fields}
        answer = httpx.post(worker.url + "/v1/completions", json=body, headers=headers, timeout=60)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    other = {"authorization": "Bearer other-key"}
    assert [cached(CLIENT), cached(CLIENT), cached(other), cached(other)] == [0, 192, 0, 192]
    shared = [cached(each, cache_salt="ours") for each in (CLIENT, other)]
    assert shared == [0, 192]


def test_only_the_open_list_answers_without_the_right_bearer(worker: Worker) -> None:
    wrong = {"authorization": "Bearer client-canary-91bd"}
    for headers in ({}, wrong, {"authorization": "Basic Og=="}):
        for path in ("/v1/completions", "/generate", "/v1/models", "/load", "/metrics", "/nowhere"):
            assert httpx.get(worker.url + path, headers=headers).status_code == 401, path
        for path in ("/v1/runtime_config", "/v1/evidence", "/v1/integrity", "/nowhere"):
            assert httpx.get(worker.admin_url + path, headers=headers).status_code == 401, path
        assert httpx.get(worker.admin_url + "/metrics", headers=headers).status_code == 200
        for path in ("/health", "/healthz", "/readyz", "/version"):
            assert httpx.get(worker.url + path, headers=headers).status_code == 200, path
    assert httpx.get(worker.url + "/v1/models", headers=CLIENT).status_code == 200
    assert httpx.get(worker.url + "/v1/models", headers=ADMIN).status_code == 401
    assert httpx.get(worker.admin_url + "/v1/evidence", headers=CLIENT).status_code == 401


def test_no_secret_shows_in_log_metrics_or_errors(worker: Worker) -> None:
    seen = worker.log.read_text() + httpx.get(worker.admin_url + "/metrics").text
    seen += httpx.get(worker.url + "/nowhere", headers=CLIENT).text
    assert "canary" not in seen
    assert "Traceback" not in seen


def test_a_page_in_a_browser_may_ask_with_the_key_and_its_preflight_needs_none(
    worker: Worker,
) -> None:
    """As of vLLM; the admin port is for no page."""
    origin = {"origin": "http://chat.example"}
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "x-key"}
    asked = httpx.options(worker.url + "/v1/completions", headers=origin | wanted)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "*"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "x-key"
    refused = httpx.get(worker.url + "/v1/models", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
    listed = httpx.get(worker.url + "/v1/models", headers=origin | CLIENT)
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, "*")
    admin = httpx.get(worker.admin_url + "/v1/runtime_config", headers=origin | ADMIN)
    assert "access-control-allow-origin" not in admin.headers
