"""Background requests at a real worker, and at a real gate before a made-up engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.gate_process import Call, inner_gate, made_up_engine
from integration.worker_process import running_worker
from sluice_cluster.shell import wait_until
from sluice_core.contract import Evidence, decode
from sluice_core.work import BACKGROUND, CLASS_HEADER

BEHIND = {CLASS_HEADER: BACKGROUND}


def body(num: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "a b c",
        "max_tokens": num,
        "ignore_eos": True,
        "temperature": 0,
    }


async def test_a_worker_runs_them_beside_others_and_counts_them_in_no_target(
    tmp_path: Path,
) -> None:
    flags = ("--max-num-seqs=2", "--initial-num-seqs=2", "--slo-ttft-ms=60000")
    with running_worker(tmp_path, *flags) as worker:
        url = f"{worker.url}/v1/completions"
        async with httpx.AsyncClient(timeout=120) as client:
            behind = [
                asyncio.create_task(client.post(url, json=body(100), headers=BEHIND))
                for _ in range(6)
            ]
            await asyncio.to_thread(worker.until_metric, "sluice_num_requests_background", 6)
            online = [client.post(url, json=body(20)) for _ in range(3)]
            answers = [*await asyncio.gather(*online), *await asyncio.gather(*behind)]
        assert [answer.status_code for answer in answers] == [200] * 9
        made = [answer.json()["usage"]["completion_tokens"] for answer in answers]
        assert made == [20] * 3 + [100] * 6
        texts = {answer.json()["choices"][0]["text"] for answer in answers[3:]}
        assert len(texts) == 1, "one that gave way says the same"
        found: list[Evidence] = []

        def is_counted() -> bool:
            told = httpx.get(f"{worker.admin_url}/v1/evidence", timeout=30).content
            found.append(decode(told, Evidence))
            return sum(tick.finished for tick in found[-1].ticks) >= 3

        wait_until("three are counted", is_counted, 30)
        ticks = found[-1].ticks
        assert sum(tick.arrivals for tick in ticks) == 3
        assert sum(tick.ttft.n for tick in ticks) == 3
        assert sum(tick.generated_tokens for tick in ticks) == 60
        assert worker.metric("sluice_background_requests_total") == 6
        assert worker.metric("vllm:generation_tokens_total") == 660


@pytest.mark.timeout(120)
async def test_a_gate_recalls_one_for_another_and_sends_it_again() -> None:
    calls: list[str] = []
    let_go, came, is_next = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answers(call: Call) -> None:
        name = call.headers.get("x-name", "")
        calls.append(name)
        came.set()
        if name == "behind" and calls.count("behind") == 1:
            await call.gone()
            calls.append("behind left")
            return
        if name == "online":
            is_next.set()
            await let_go.wait()
        told = json.dumps({"choices": [], "usage": {"completion_tokens": 3}}).encode()
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        await call.write(b"content-length: %d\r\n\r\n" % len(told) + told)

    async with (
        made_up_engine(answers) as upstream,
        inner_gate(upstream, "--max-num-seqs=1") as (gate, url),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        path, asked = "/v1/completions", {"prompt": "a"}
        behind = asyncio.create_task(
            client.post(path, json=asked, headers={**BEHIND, "x-name": "behind"})
        )
        await came.wait()
        online = asyncio.create_task(client.post(path, json=asked, headers={"x-name": "online"}))
        await is_next.wait()
        assert calls == ["behind", "behind left", "online"]
        assert gate.backend.queue.background.waiting == 1
        let_go.set()
        assert [(await each).status_code for each in (online, behind)] == [200, 200]
        assert calls[3:] == ["behind"]
        counts = gate.runtime.stats.background
        assert counts == {"finished": 1}
        tick = gate.runtime.recorder.ticks
        assert tick.open.arrivals + sum(t.arrivals for t in tick.after(0)) == 1
