"""Static batches of a real worker: an incomplete one starts after its time, and it stays alive."""

import asyncio
import time
from pathlib import Path

import httpx
from integration.worker_process import running_worker


async def post_all(url: str, lengths: list[int]) -> list[dict[str, int]]:
    async with httpx.AsyncClient(timeout=60) as client:

        async def one(max_tokens: int) -> dict[str, int]:
            body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
            answer = await client.post(url + "/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage: dict[str, int] = answer.json()["usage"]
            return usage

        return await asyncio.gather(*(one(length) for length in lengths))


async def get(url: str) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(url)).text


async def test_full_and_timed_out_batches_are_served_and_their_padding_is_counted(
    tmp_path: Path,
) -> None:
    flags = (
        *("--batching-mode", "static", "--static-batch-size", "4"),
        *("--static-batch-timeout-ms", "5000", "--num-gpu-blocks-override", "128"),
    )
    with running_worker(tmp_path, *flags) as worker:
        lengths = [5, 40, 20, 60]
        usages = await post_all(worker.url, lengths)
        assert [usage["completion_tokens"] for usage in usages] == lengths
        # Each row but the longest is padded to the end of the batch.
        padding = sum(60 - length for length in lengths)
        assert worker.metric("sluice_padding_waste") > 0
        text = await get(worker.admin_url + "/metrics")
        assert f'kind="padding",model_name="tiny"}} {padding}.0' in text
        started = time.monotonic()
        (alone,) = await post_all(worker.url, [3])
        assert alone["completion_tokens"] == 3
        assert time.monotonic() - started >= 5.0
        assert await get(worker.admin_url + "/v1/integrity") == '{"problem":null}'


async def test_a_batch_of_all_that_memory_holds_waits_for_no_more(tmp_path: Path) -> None:
    flags = (
        *("--batching-mode", "static", "--static-batch-size", "4", "--max-num-seqs", "2"),
        *("--static-batch-timeout-ms", "9000", "--num-gpu-blocks-override", "128"),
    )
    with running_worker(tmp_path, *flags) as worker:
        started = time.monotonic()
        await post_all(worker.url, [3, 3])
        assert time.monotonic() - started < 9.0
