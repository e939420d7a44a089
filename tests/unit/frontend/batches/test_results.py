"""The file of results: whatever a killed writer left of it, each id comes to stand in it once."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_frontend.batches.index import Index
from sluice_frontend.batches.item import Item, Refusal, answered, unanswered
from sluice_frontend.batches.results import OPENING, Results

IDS = ["a", "b\n", "ü", "d" * 40, '"e"']


def whole(path: Path) -> bytes:
    """A valid file of all ids, whose lines are of each kind."""
    path.unlink(missing_ok=True)
    with Results(path) as results:
        for i, custom_id in enumerate(IDS):
            body = json.dumps({"text": "x" * i, "nl": "\n"}, indent=1).encode()
            results.append(
                unanswered(custom_id, "timeout", TimeoutError())
                if i == 2
                else answered(custom_id, 400 if i == 3 else 200, "r", body)
            )
    return path.read_bytes()


def resumed(path: Path) -> list[str]:
    """Ids in the file after a run that sends what is not in it."""
    index = Index()
    for number, custom_id in enumerate(IDS, 1):
        assert index.add(Item(number, custom_id, "/r", 0, 1)) is None
    with Results(path) as results:
        for result in results.read():
            assert index.mark(result.custom_id, is_ok=result.is_ok)
        for item in list(index.pending()):
            results.append(answered(item.custom_id, 200, "", b"{}"))
    return [json.loads(line)["custom_id"] for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results") / "out.jsonl"


def test_a_file_that_is_cut_at_any_byte_gets_each_id_once(out: Path) -> None:
    data = whole(out)
    for length in range(len(data) + 1):
        out.write_bytes(data[:length])
        assert sorted(resumed(out)) == sorted(IDS), length


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_a_file_that_is_cut_again_and_again_gets_each_id_once(out: Path, cuts: list[float]) -> None:
    whole(out)
    for share in cuts:
        os.truncate(out, int(share * out.stat().st_size))
        assert sorted(resumed(out)) == sorted(IDS)


def test_lines_are_those_of_openai(out: Path) -> None:
    lines = [json.loads(line) for line in whole(out).splitlines()]
    good, late, refused = lines[0], lines[2], lines[3]
    assert list(good) == ["id", "custom_id", "response", "error"]
    assert good["response"] == {
        "status_code": 200, "request_id": "r", "body": {"text": "", "nl": "\n"},
    }  # fmt: skip
    assert good["error"] is None
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert late["response"] is None
    assert late["error"] == {"code": "timeout", "message": "TimeoutError: "}
    assert all(line["id"].startswith("batch_req_") for line in lines)
    assert whole(out).startswith(OPENING)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a letter to somebody", "ends with a line that is no result"),
        ('{"custom_id": "a", "method": "POST", "url": "/r", "body": {}}\n', "line 1 of"),
        ('{"id":"batch_req_1","custom_id":"a","response":null,"error":null}\n\n', "line 2 of"),
    ],
)
def test_a_file_of_something_else_is_refused_and_stays(out: Path, text: str, said: str) -> None:
    out.write_text(text)
    with Results(out) as results, pytest.raises(Refusal, match=said):
        list(results.read())
    assert out.read_text() == text


def test_a_second_writer_is_refused_until_the_first_has_ended(out: Path) -> None:
    with (
        Results(out),
        pytest.raises(Refusal, match="is being written by another run"),
        Results(out),
    ):
        pass
    with Results(out):
        pass


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/nowhere/out"])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(Refusal), Results(Path(path)):
        pass


WRITER = """
import sys
from pathlib import Path
from sluice_frontend.batches.results import Results, WriteError
from sluice_frontend.batches.item import answered
with Results(Path(sys.argv[1])) as results:
    try:
        for i in range(100_000):
            results.append(answered(str(i), 200, "", b'{"text": "%s"}' % (b"x" * 100)))
    except WriteError as e:
        print(i, e)
"""


def written(path: Path) -> tuple[int, str]:
    """How many lines a writer could write, and why no more."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(path)], capture_output=True, text=True, check=True
    )
    num, _, said = done.stdout.partition(" ")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [str(i) for i in range(int(num))]
    return int(num), said


def test_a_file_at_its_limit_keeps_its_whole_lines(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        num, said = written(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert num > 10
    assert "cannot be written: File too large" in said


def test_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root mounts a small disk")
    try:
        num, said = written(tmp_path / "out")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert num > 10
    assert "cannot be written: No space left on device" in said
