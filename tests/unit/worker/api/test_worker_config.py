"""Flags: the values asked for, or every problem at once."""

from pathlib import Path

import pytest
from sluice_worker.config import parse
from sluice_worker.errors import ConfigError
from unit.worker.api.tiny import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def problems_of(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        parse(arguments)
    return refused.value.problems


def test_flags_become_the_two_configurations(model: Path) -> None:
    config = parse(
        [
            *("--model", str(model), "--load-format", "dummy", "--max-num-seqs", "8"),
            *("--gpu-memory-utilization", "0.90", "--no-enable-prefix-caching", "--port", "9000"),
            *("--slo-itl-ms", "50", "--slo-ttft-ms", "500", "--served-model-name", "tiny"),
        ]
    )
    assert (config.engine.max_num_seqs, config.engine.memory_utilization) == (8, 0.9)
    assert (config.engine.enable_prefix_caching, config.engine.itl_ms) == (False, 50)
    assert (config.server.port, config.server.slo.ttft_ms, config.model_name) == (9000, 500, "tiny")


def test_every_problem_is_named_in_a_sentence_of_its_own(model: Path) -> None:
    problems = problems_of(
        *("--model", str(model), "--port", "70000", "--dtype", "int3", "--max-num-seqs", "many"),
        *("--overload", "Shed", "--colour"),
    )
    expected = ("--colour", "--dtype", "--max-num-seqs", "--port", "--overload", "safetensors")
    for word in expected:
        assert sum(word in problem for problem in problems) == 1, problems
    assert len(problems) == len(expected)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--port", "8001"), "different ports"),
        (("--max-num-seqs", "4", "--initial-num-seqs", "5"), "--initial-num-seqs"),
        (("--max-num-seqs", "4", "--max-num-batched-tokens", "3"), "--max-num-batched-tokens"),
        (("--runtime-config-dir", "/nowhere/at/all"), "--runtime-config-dir"),
        (("--admin-token-file", "/nowhere/at/all"), "--admin-token-file"),
        (("--liveness-timeout", "nan"), "--liveness-timeout"),
        (("--shutdown-timeout", "inf"), "--shutdown-timeout"),
        (("--seed",), "--seed"),
    ],
)
def test_contradictions_and_bad_files_are_refused(
    model: Path, flags: tuple[str, ...], word: str
) -> None:
    (problem,) = problems_of("--model", str(model), "--load-format", "dummy", *flags)
    assert word in problem


def test_cap_and_epoch_come_from_the_runtime_directory_first(model: Path, tmp_path: Path) -> None:
    (tmp_path / "max_num_seqs").write_text("6\n")
    (tmp_path / "epoch").write_text("41")
    flags = ("--model", str(model), "--load-format", "dummy", "--initial-num-seqs", "2")
    with_files = parse([*flags, "--runtime-config-dir", str(tmp_path)])
    assert (with_files.engine.initial_num_seqs, with_files.engine.epoch) == (6, 41)
    (tmp_path / "max_num_seqs").unlink()
    assert parse([*flags, "--runtime-config-dir", str(tmp_path)]).engine.initial_num_seqs == 2


def test_an_empty_secret_file_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(" \n\n")
    flags = ("--load-format", "dummy", "--api-key-file", str(tmp_path / "keys"))
    (problem,) = problems_of("--model", str(model), *flags)
    assert "holds no key" in problem
