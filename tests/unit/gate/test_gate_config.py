"""The gate's flags, and the operator's files."""

from pathlib import Path

import pytest
from sluice_core.errors import ConfigError
from sluice_gate.config import parse
from sluice_gate.gate import live_at_start

UPSTREAM = ("--upstream", "http://127.0.0.1:8100")


def test_a_cap_of_the_operator_over_this_engines_capacity_starts_at_the_capacity(
    tmp_path: Path,
) -> None:
    (tmp_path / "max_num_seqs").write_text("64")
    (tmp_path / "epoch").write_text("7")
    config = parse([*UPSTREAM, "--max-num-seqs", "8", "--runtime-config-dir", str(tmp_path)], {})
    live = live_at_start(config)
    assert (live.max_num_seqs, live.epoch) == (8, 7)


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
