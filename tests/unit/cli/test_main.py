"""`sluice` itself: where its output cannot go, and what is not there."""

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from sluice.__main__ import COMMANDS, EXIT_SIGPIPE, main

TOO_LARGE = str(Path(__file__).parents[3] / "examples/models/too-large")
PLAN = ("plan", TOO_LARGE, "--memory", "320Gi")
PARAMS = '{"a": 20, "b": 1, "c": 0.001, "d": 0.1, "kv_tokens": 9000, "cold_start_s": 5}'
REQUEST = '{"t_s": 0, "prompt_tokens": 9, "max_tokens": 2}\n'


def command_line(name: str, folder: Path) -> tuple[str, ...]:
    (folder / "p.json").write_text(PARAMS)
    (folder / "t.jsonl").write_text(REQUEST)
    return {
        "plan": PLAN,
        "load": ("load", "--url", "http://127.0.0.1:1", "--model", "m", "--phases", "a:burst:1:1"),
        "simulate": (
            *("simulate", "--trace", str(folder / "t.jsonl"), "--params", str(folder / "p.json")),
            *("--policy", "fixed:2"),
        ),
    }[name]


def written_to(output: int, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", *arguments],
        stdout=output, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["plan", "load", "simulate"])
def test_a_reader_who_has_left_is_told_by_the_exit_code_alone(name: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert written_to(writer, *command_line(name, tmp_path)) == (EXIT_SIGPIPE, "")
    os.close(writer)


@pytest.mark.parametrize("name", ["plan", "load"])
def test_output_that_cannot_be_written_is_one_sentence(name: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        status, told = written_to(full.fileno(), *command_line(name, tmp_path))
    assert (status, told.count("\n")) == (1, 1)
    assert told.startswith(f"sluice {name}: [Errno 28]")


def test_a_command_of_which_a_part_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the operator's image, which holds some modules of the worker's package."""

    def missing(name: str) -> None:
        raise ImportError("cannot import name '__main__'", name="sluice_worker")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SystemExit, match="sluice serve: sluice_worker is not installed here"):
        main(["serve", "x"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_opens_with_what_the_command_does_and_tells_defaults(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert COMMANDS[name] in told
    assert "(default: None)" not in told
    if name in ("bench", "load"):
        assert "--seed SEED of lengths, tokens" in told
        assert "(default: 0)" in told


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == version("sluice")
