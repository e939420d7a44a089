"""`sluice batch` in the pods of a Job: shards, the mark of background work, and what it reports."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from sluice.__main__ import main
from sluice.processes import free_ports
from sluice_cluster.shell import wait_until
from sluice_core.contract import BatchReport, decode
from unit.cli.batch.tiny_api import Reply, TinyApi, line, results, tiny_api, write_input

NO = Reply(400, b'{"error": {"message": "no"}}')


@pytest.fixture
def last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_TERMINATION_LOG", str(tmp_path / "word"))
    return tmp_path / "word"


def batch(folder: Path, url: str, *flags: str, out: str = "out") -> int:
    return main(["batch", str(folder / "in"), "-o", str(folder / out), "--url", url, *flags])


def told(word: Path) -> BatchReport:
    return decode(word.read_bytes(), BatchReport)


def test_shards_send_each_line_once_and_check_them_all(
    api: TinyApi, tmp_path: Path, last_word: Path
) -> None:
    write_input(tmp_path / "in", 10)
    for shard in range(3):
        assert batch(tmp_path, api.url, f"--shard={shard}/3", out=f"new/out.{shard}.jsonl") == 0
        assert told(last_word).total == 10
    ids = [each["custom_id"] for n in range(3) for each in results(tmp_path / f"new/out.{n}.jsonl")]
    assert sorted(map(int, ids)) == [*range(10)]
    assert len(api.asked) == 10
    with (tmp_path / "in").open("a") as file:
        file.write("{\n" + line("3"))
    assert batch(tmp_path, api.url, "--shard=0/3", out="new/out.0.jsonl") == 2
    assert "line 11: it is not JSON" in told(last_word).message
    assert "its custom_id '3' is that of line 4" in told(last_word).message
    assert told(last_word).total == 0


def test_more_shards_than_lines_is_no_failure(api: TinyApi, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 1)
    assert batch(tmp_path, api.url, "--shard=0/2") == 0
    assert results(tmp_path / "out") == []


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "a/b", "0/0", "1/"])
def test_a_shard_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit):
        batch(tmp_path, "http://127.0.0.1:9", f"--shard={text}")


@pytest.mark.parametrize("flags", [(), ("--background",)])
def test_only_background_work_bears_its_mark(
    api: TinyApi, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    write_input(tmp_path / "in", 2)
    assert batch(tmp_path, api.url, *flags) == 0
    marks = {asked.headers.get("x-slo-class") for asked in api.asked}
    assert marks == ({"background"} if flags else {None})


def test_counts_are_told_on_the_way_and_at_the_end_and_failures_are_no_failed_pod(
    api: TinyApi, tmp_path: Path, last_word: Path
) -> None:
    write_input(tmp_path / "in", 12)
    api.says = lambda asked: NO if asked.body["input"] in ("3", "7") else Reply()
    [port] = free_ports(1)
    api.hold()
    process = subprocess.Popen(_command(tmp_path, api.url, port))
    try:
        wait_until("the batch to send", lambda: len(api.asked) == 12, 30)
        answer = httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
        assert decode(answer.content, BatchReport) == BatchReport(12, 12, 0, 0, 0.0)
        api.release()
        assert process.wait(30) == 0
    finally:
        process.kill()
    report = told(last_word)
    assert (report.total, report.pending, report.completed, report.failed) == (12, 0, 10, 2)
    assert report.message == f"12 of 12 done, 2 failed: {tmp_path / 'out'}."
    api.says = lambda asked: NO
    assert batch(tmp_path, api.url, out="other") == 3
    assert batch(tmp_path, api.url, f"--report-port={port}", out="other") == 0


def test_with_reports_an_api_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 2)
    [port, report_port] = free_ports(2)
    process = subprocess.Popen(_command(tmp_path, f"http://127.0.0.1:{port}", report_port))
    try:
        wait_until("the batch to wait", lambda: _pending(report_port) == 2, 30)
        with tiny_api(port=port):
            assert process.wait(30) == 0
    finally:
        process.kill()
    assert len(results(tmp_path / "out")) == 2


def _pending(port: int) -> int | None:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
    except httpx.TransportError:
        return None
    return decode(answer.content, BatchReport).pending


def _command(folder: Path, url: str, report_port: int) -> list[str]:
    given = [str(folder / "in"), "-o", str(folder / "out"), f"--url={url}"]
    flags = [f"--report-port={report_port}", "--shard=0/1"]
    return [sys.executable, "-m", "sluice", "batch", *given, *flags]
