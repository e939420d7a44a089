"""A real worker with two keys: the crowd of one leaves the other its part."""

import asyncio
import json
from pathlib import Path

import pytest
from integration.worker_process import running_worker
from unit.gate.crowds import Client

LASTS_S = 6.0
LEAST_PART = 0.35


@pytest.mark.parametrize("flags", [(), ("--slo-ttft-ms", "60000")], ids=["by arrival", "deadlines"])
async def test_a_second_key_has_about_half_of_the_tokens_beside_a_crowd(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    keys = ("--api-key-file", str(tmp_path / "keys"))
    started = running_worker(
        tmp_path, "--max-num-seqs", "4", "--initial-num-seqs", "4", *keys, *flags
    )
    worker = await asyncio.to_thread(started.__enter__)
    tokens = {"a": 0, "b": 0}

    async def ask(client: Client, name: str) -> None:
        while True:
            status, text = await client.ask(model="tiny", max_tokens=64, ignore_eos=True)
            assert status == 200, text
            tokens[name] += json.loads(text)["usage"]["completion_tokens"]

    try:
        async with Client(worker.url, key="a") as first, Client(worker.url, key="b") as second:
            tasks = [asyncio.create_task(ask(first, "a")) for _ in range(40)]
            await asyncio.sleep(1.0)
            before = tokens["a"]
            tasks += [asyncio.create_task(ask(second, "b")) for _ in range(8)]
            done, _ = await asyncio.wait(tasks, timeout=LASTS_S)
            assert not done, [task.exception() for task in done]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)
    part = tokens["b"] / (tokens["a"] - before + tokens["b"])
    assert part > LEAST_PART, tokens
