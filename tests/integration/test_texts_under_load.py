"""A worker full of texts: health answers, and clients that leave free their places."""

import asyncio
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from integration.worker_process import POLL_S, Worker, running_worker
from unit.worker.execution.encoder_models import random_model, save_tokenizer

MANY = ["abcdefgh" * (1 + number % 7) for number in range(2048)]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("load")
    random_model("Bert", **SIZES).save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    flags = ("--load-format", "auto")
    with running_worker(directory, *flags, model=directory / "model") as worker:
        yield worker


async def test_health_answers_while_many_texts_are_read_and_computed(worker: Worker) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        asked = asyncio.create_task(
            client.post(worker.url + "/v1/embeddings", json={"input": MANY})
        )
        took_s = list[float]()
        while not asked.done():
            began_s = time.monotonic()
            (await client.get(worker.url + "/health")).raise_for_status()
            took_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.01)
        reply = asked.result()
        assert reply.status_code == 200, reply.text[:500]
        assert len(reply.json()["data"]) == len(MANY)
    assert len(took_s) > 20
    assert statistics.median(took_s) < 0.05


def test_a_client_that_leaves_frees_the_places_of_its_texts(worker: Worker) -> None:
    body = msgspec.json.encode({"input": MANY})
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    computed = worker.metric("vllm:e2e_request_latency_seconds_count")
    address = urlsplit(worker.url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + body)
        while worker.metric("vllm:num_requests_waiting") < 1000:
            time.sleep(POLL_S)
    worker.until_metric("vllm:num_requests_waiting", 0)
    assert worker.metric("vllm:e2e_request_latency_seconds_count") < computed + len(MANY) - 500
    reply = httpx.post(worker.url + "/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 200
