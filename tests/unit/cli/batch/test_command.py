"""`sluice batch` against a tiny API: its exit codes, its last line, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sluice.__main__ import main
from sluice.batch import run, target
from sluice.batch.run import ToldRun
from sluice_frontend.batches.index import Index
from sluice_frontend.batches.item import Item
from unit.cli.batch.tiny_api import Asked, Reply, TinyApi, line, results, tiny_api, write_input

REFUSED = Reply(400, b'{"error": {"message": "no"}}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path / "in", 12)
    return tmp_path


def batch(folder: Path, url: str, *flags: str) -> int:
    return main(["batch", str(folder / "in"), "-o", str(folder / "out"), "--url", url, *flags])


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def only(failing: set[str]) -> Callable[[Asked], Reply]:
    return lambda asked: REFUSED if asked.body["input"] in failing else Reply()


@pytest.mark.parametrize(
    ("failing", "code", "said"),
    [
        (set(), 0, "12 of 12 done, 0 failed"),
        ({"3", "7"}, 1, "12 of 12 done, 2 failed"),
        ({str(i) for i in range(12)}, 3, "12 of 12 done, all failed"),
    ],
)
def test_the_exit_code_and_the_last_line_tell_how_it_ended_and_so_again(
    api: TinyApi,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    failing: set[str],
    code: int,
    said: str,
) -> None:
    api.says = only(failing)
    for num_told in (min(len(failing), 1), 0):
        assert batch(folder, api.url) == code
        shown = capsys.readouterr()
        assert shown.out == f"{said}: {folder / 'out'}.\n"
        assert shown.err.count("The first that failed: ") == shown.err.count('"no"') == num_told
        assert sorted(int(each["custom_id"]) for each in results(folder / "out")) == [*range(12)]
    assert len(api.asked) == 12, "the second run has sent something"


def test_a_bad_input_is_refused_whole_and_nothing_is_sent(
    api: TinyApi, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (folder / "in").read_text()
    (folder / "in").write_text(good + "{\n" + line("3") + line("x", stream=True))
    assert batch(folder, api.url) == 2
    said = capsys.readouterr().err
    assert "nothing was sent: line 13: it is not JSON" in said
    assert "line 14: its custom_id '3' is that of line 4; line 15: its body asks for a" in said
    assert said.count("\n") == 1
    (folder / "in").write_text(line("x") * 40)
    assert batch(folder, api.url) == 2
    assert capsys.readouterr().err.endswith(
        "line 11: its custom_id 'x' is that of line 1; and 29 more\n"
    )
    (folder / "in").write_text("\n")
    assert batch(folder, api.url) == 2
    assert "the input has no request" in capsys.readouterr().err
    (folder / "in").unlink()
    assert batch(folder, api.url) == 2
    assert "is no file and no folder that can be read" in capsys.readouterr().err
    assert not api.asked
    assert not (folder / "out").exists()


def test_an_output_of_another_input_is_refused_and_stays(
    api: TinyApi, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(folder, api.url) == 0
    before = (folder / "out").read_bytes()
    write_input(folder / "in", 11)
    assert batch(folder, api.url) == 2
    assert "custom_id '11' is not in this one, or twice in it" in capsys.readouterr().err
    assert (folder / "out").read_bytes() == before
    (folder / "in").write_bytes((folder / "out").read_bytes())
    assert main(["batch", str(folder / "in"), "-o", str(folder / "in"), "--url", api.url]) == 2
    assert (folder / "in").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--route", "/classify"), "--route is for a folder"),
        (("--max-num-seqs", "4"), "unrecognized arguments: --max-num-seqs 4; only --model starts"),
        (("--api-key-file", "/nowhere"), "/nowhere cannot be read"),
        (("--admin-url", "http://127.0.0.1:9"), "no admin port answers at http://127.0.0.1:9"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(
    api: TinyApi,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    said: str,
) -> None:
    assert batch(folder, api.url, *flags) == 2
    assert said in capsys.readouterr().err
    assert not api.asked


def test_an_endpoint_that_wants_a_key_gets_that_of_the_variable_or_nothing_is_sent(
    api: TinyApi,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api.models = Reply(401)
    assert batch(folder, api.url) == 2
    assert "wants its bearer: --api-key-file" in capsys.readouterr().err
    assert not api.asked
    api.models = Reply(404)
    monkeypatch.setenv("VLLM_API_KEY", "canary")
    assert batch(folder, api.url) == 0
    assert {asked.headers["Authorization"] for asked in api.asked} == {"Bearer canary"}
    assert "canary" not in "".join(capsys.readouterr())


def test_nothing_is_written_where_nothing_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(folder, "http://127.0.0.1:9") == 2
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert results(folder / "out") == []


def test_an_engine_that_cannot_start_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["batch", str(folder / "in"), "-o", str(folder / "out"), "--model", str(folder / "no")]
    assert main([*line, "--max-num-seqs", "2"]) == 2
    assert "the engine ended with 2 before it was ready" in capfd.readouterr().err


def test_as_many_are_under_way_as_asked_for(api: TinyApi, folder: Path) -> None:
    api.hold()
    with Running(folder, api.url, "--concurrency", "5") as process:
        until(lambda: len(api.asked) == 5)
        api.release()
        assert process.wait(30) == 0
    assert max(asked.open for asked in api.asked) == 5


def test_a_limit_is_halved_once_for_all_that_were_sent_under_it() -> None:
    made = target.Target(None, "", None, 64, is_background=False)  # type: ignore[arg-type]
    sent_s, found = time.monotonic(), [made.limit]
    for at_s in (sent_s, sent_s, time.monotonic() + 1):
        made.slow_down(at_s)
        found.append(made.limit)
    assert found == [64, 32, 32, 16]


class Running:
    """`sluice batch` in a process of its own; killed on leaving."""

    def __init__(self, folder: Path, url: str, *flags: str) -> None:
        self._line = [sys.executable, "-m", "sluice", "batch", str(folder / "in"), "-o"]
        self._line += [str(folder / "out"), "--url", url, *flags]

    def __enter__(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            self._line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_second_run_on_one_output_is_refused(
    api: TinyApi, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.hold()
    with Running(folder, api.url, "--concurrency", "1") as process:
        until(lambda: bool(api.asked))
        assert batch(folder, api.url) == 6
        assert "is being written by another run" in capsys.readouterr().err
        api.release()
        assert process.wait(30) == 0
    assert len(results(folder / "out")) == len(api.asked) == 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_what_is_under_way_and_the_same_command_goes_on(
    api: TinyApi, folder: Path, number: signal.Signals
) -> None:
    api.hold()
    with Running(folder, api.url, "--concurrency", "3") as process:
        until(lambda: len(api.asked) == 3)
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.readline() == "Leaving; 3 requests get 30 s.\n"
        api.release()
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 130
    assert said == (
        f"3 of 12 done, 0 failed: {folder / 'out'}. It was interrupted; the same command goes on.\n"
    )
    assert len(results(folder / "out")) == len(api.asked) == 3
    assert batch(folder, api.url) == 0
    assert len(results(folder / "out")) == len(api.asked) == 12


def test_a_second_signal_waits_for_nothing(api: TinyApi, folder: Path) -> None:
    api.hold()
    with Running(folder, api.url, "--concurrency", "3") as process:
        until(lambda: len(api.asked) == 3)
        process.terminate()
        assert process.stderr is not None
        process.stderr.readline()
        process.terminate()
        assert process.wait(20) == 130
    assert results(folder / "out") == []


def test_a_full_disk_keeps_what_is_done_and_says_so(api: TinyApi, folder: Path) -> None:
    api.says = lambda asked: Reply(data=json.dumps({"x": "y" * 3000}).encode())
    limit = ["prlimit", "--fsize=10000", sys.executable, "-m", "sluice", "batch"]
    done = subprocess.run(
        [*limit, str(folder / "in"), "-o", str(folder / "out"), "--url", api.url],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert done.stdout == (
        f"3 of 12 done, 0 failed: {folder / 'out'}. {folder / 'out'} cannot be written: "
        "File too large; the same command goes on.\n"
    )
    assert len(results(folder / "out")) == 3
    assert batch(folder, api.url) == 0
    assert len({each["custom_id"] for each in results(folder / "out")}) == 12


def test_an_endpoint_that_goes_stops_the_run_and_burns_no_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_api() as api:
        api.hold()
        with Running(folder, api.url, "--concurrency", "2", "--max-retries", "0") as process:
            until(lambda: len(api.asked) == 2)
            api.stop()
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "does not answer any more; the same command goes on." in said
    assert all(each["error"] is None for each in results(folder / "out"))


def test_a_folder_becomes_requests_of_the_first_model(
    api: TinyApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    given = ["batch", str(tmp_path / "texts"), "-o", str(tmp_path / "out"), "--url", api.url]
    assert main(given) == 2
    assert "a folder needs --route" in capsys.readouterr().err
    assert main([*given, "--route", "/v1/embeddings", "--prompt", "x"]) == 2
    chat = ["--route", "/v1/chat/completions", "--prompt", "Sum up:"]
    assert main([*given, *chat, "--fields", '{"max_tokens": 9}']) == 0
    [asked] = api.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "max_tokens": 9, "model": "tiny",
        "messages": [{"role": "user", "content": "Sum up:\n\none"}],
    }  # fmt: skip
    assert [each["custom_id"] for each in results(tmp_path / "out")] == ["a.txt"]


def test_a_folder_that_cannot_be_read_is_refused(
    api: TinyApi,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scandir(path: Path) -> None:  # root may read anything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    given = ["batch", str(tmp_path), "-o", str(tmp_path / "out"), "--url", api.url]
    assert main([*given, "--route", "/classify"]) == 2
    assert "the input cannot be read: [Errno 13]" in capsys.readouterr().err


def test_progress_tells_done_failed_rate_and_time_left() -> None:
    index = Index()
    for i in range(10):
        index.add(Item(i, str(i), "/r", 0, 1))
    index.mark("1", is_ok=False)
    index.mark("2", is_ok=True)
    made = ToldRun(index, None, None)  # type: ignore[arg-type]
    made.pending, made.ok = 4, 5
    assert made.progress(4, 2.0) == "6 of 10 done, 1 failed, 2.00/s, 2 s left"
    assert made.progress(0, 2.0) == "6 of 10 done, 1 failed, 0.00/s, time left unknown"


def test_progress_comes_while_it_runs(
    api: TinyApi,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = ToldRun.progress

    def told(self: ToldRun, num: int, seconds: float) -> str:
        api.release()
        return real(self, num, seconds)

    monkeypatch.setattr(run, "SAY_EVERY_S", 0.05)
    monkeypatch.setattr(ToldRun, "progress", told)
    api.hold()
    assert batch(folder, api.url) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "0 of 12 done, 0 failed, 0.00/s, time left unknown"
