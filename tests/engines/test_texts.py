"""A foreign engine that makes vectors, behind the gate: Infinity, as a Custom engine.

Skipped where Infinity is not installed (`python -m bench.texts`), unless SLUICE_REQUIRE_ENGINES.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from bench.peers.checkpoint import CACHE
from bench.texts import infinity
from integration.test_gate_hostile_numbers import evidence, until
from integration.worker_process import Worker, gate_of

CAP, NUM = 3, 40
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (CACHE / "infinity" / ".ready").exists()
        and not os.environ.get("SLUICE_REQUIRE_ENGINES"),
        reason="Infinity is not installed: `python -m bench.texts`",
    ),
]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    flags = ("--engine", "custom", "--max-num-seqs", str(CAP), "--slo-e2e-ms", "1")
    with infinity() as (_, url), gate_of(url, tmp_path_factory.mktemp("gate"), *flags) as gate:
        yield gate


def test_the_gate_counts_texts_and_judges_their_end(gate: Worker) -> None:
    body = {"model": "tiny", "input": ["a text", "another one"]}

    def ask(number: int) -> int:
        return httpx.post(f"{gate.url}/v1/embeddings", json=body, timeout=60).status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(NUM))) == {200}
    until(lambda: sum(tick.finished for tick in evidence(gate).ticks) == 2 * NUM)
    ticks = evidence(gate).ticks
    assert max(tick.max_running for tick in ticks) <= CAP
    assert sum(tick.e2e.over for tick in ticks) == sum(tick.e2e.n for tick in ticks) > 0
    assert not any(tick.generated_tokens or tick.ttft.n for tick in ticks)


def test_a_lower_cap_holds_at_once(gate: Worker) -> None:
    answer = httpx.patch(gate.admin_url + "/v1/runtime_config", json={"epoch": 1, "cap": 1})
    assert answer.status_code == 200, answer.text
    assert httpx.get(gate.admin_url + "/v1/runtime_config").json()["cap"] == 1


def test_what_the_engine_refuses_is_told_as_it_says(gate: Worker, tmp_path: Path) -> None:
    body = {"model": "tiny", "input": ["a"] * 2049}
    answer = httpx.post(f"{gate.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 422
    assert httpx.get(f"{gate.url}/readyz").status_code == 200
