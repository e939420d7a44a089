"""The gate's flags, and the operator's files."""

import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sluice_core.contract import MemoryReport
from sluice_core.errors import ConfigError
from sluice_core.wire import Ready
from sluice_gate.config import parse
from sluice_gate.gate import live_at_start
from sluice_vllm.link import GateLink
from unit.gate.crowds import both, until

UPSTREAM = ("--upstream", "http://127.0.0.1:8100")


def test_a_cap_of_the_operator_over_this_engines_capacity_starts_at_the_capacity(
    tmp_path: Path,
) -> None:
    (tmp_path / "cap").write_text("64")
    (tmp_path / "epoch").write_text("7")
    config = parse([*UPSTREAM, "--max-num-seqs", "8", "--runtime-config-dir", str(tmp_path)], {})
    live = live_at_start(config)
    assert (live.cap, live.epoch) == (8, 7)


def test_all_problems_are_told_at_once() -> None:
    flags = "--port 5 --admin-port 5 --initial-num-seqs 9 --max-num-seqs 2 --overload Shed"
    flags += " --hold-share 0"
    missing = "--api-key-file /none/keys --engine-admin-key-file /none/key --bogus"
    with pytest.raises(ConfigError) as told:
        parse([*flags.split(), *missing.split()], {})
    assert [problem.split()[0] for problem in told.value.problems] == [
        *("--bogus", "--upstream", "--port", "--initial-num-seqs", "--overload"),
        *("--hold-share", "--api-key-file", "--engine-admin-key-file"),
    ]


def test_a_gate_takes_pictures_and_sounds_within_a_memory_of_its_own() -> None:
    server = parse([*UPSTREAM], {}).server
    assert server.max_body_bytes == 64 << 20
    assert server.max_body_bytes <= server.memory_bytes // 2
    small = parse([*UPSTREAM, "--memory-bytes", "8000000", "--max-body-bytes", "4000000"], {})
    assert small.server.memory_bytes == 8_000_000
    with pytest.raises(ConfigError, match="over half of the 8000000 bytes"):
        parse([*UPSTREAM, "--memory-bytes", "8000000"], {})


async def test_a_share_of_a_hold_reaches_the_engine_from_the_flag_and_live(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    own = ("--engine", "vllm", "--max-num-seqs", "4", "--engine-socket", path)
    ready = Ready(4, 4, 4, 2048, 16, 100, 1600, MemoryReport({}, {}, 1600), None, "")
    async with both(tmp_path, *own, "--slo-ttft-ms", "500", "--hold-share", "0.5") as (_, running):
        with closing(GateLink(path, lambda: ready)) as link:

            def is_told(share: float) -> bool:
                return any(told.hold_share == share for told in link.receive(time.monotonic()))

            await until(lambda: is_told(0.5))
            async with httpx.AsyncClient(base_url=running.admin_url) as client:
                change = {"epoch": 0, "hold_share": 0}
                answer = await client.patch("/v1/runtime_config", json=change)
            assert answer.status_code == 200, answer.text
            await until(lambda: is_told(0))
