"""Why a worker ends: one sentence, for people and for Kubernetes."""

import logging
import re
from pathlib import Path

import pytest
from sluice_worker.__main__ import main, run
from sluice_worker.base.config import WorkerConfig
from unit.worker.api.tiny import write_checkpoint

TERMINATION_LOG = "SLUICE_TERMINATION_LOG"
REFUSED = ["--model", "/nowhere", "--port", "70000"]


@pytest.fixture
def word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for it, as the kubelet makes one."""
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setenv(TERMINATION_LOG, str(file))
    return file


def test_what_is_refused_stands_in_the_termination_log_without_the_program(
    word: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(REFUSED) == 2
    told = word.read_text().splitlines()
    assert [line.partition(" ")[0] for line in told] == ["--port", "--model"]
    assert capsys.readouterr().err.splitlines() == [f"sluice-worker: {line}" for line in told]


def test_without_kubernetes_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TERMINATION_LOG, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(REFUSED) == 2
    assert [*tmp_path.iterdir()] == []
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_termination_log_that_cannot_be_written_is_told_before_the_sentences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TERMINATION_LOG, str(tmp_path))
    assert main(REFUSED) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"sluice-worker: {tmp_path} cannot be written: Is a directory"
    assert len(told) == 3


def test_an_error_that_nobody_foresaw_is_one_sentence_and_its_traceback_is_in_the_log_alone(
    word: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(config: WorkerConfig) -> logging.Formatter:
        raise TypeError("unforeseen\nand much more of it")

    model = write_checkpoint(tmp_path / "model")
    line = ["--model", str(model), "--load-format", "dummy"]
    assert run("sluice-worker", line, broken) == 1
    told = word.read_text()
    sentence = r"the API process failed at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: TypeError: unforeseen"
    assert re.fullmatch(sentence, told)
    assert capsys.readouterr().err == f"sluice-worker: {told}\n"
    assert "Traceback" in caplog.text
