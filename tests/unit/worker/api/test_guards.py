"""Small guards: secrets stay hidden, throttling is read from either cgroup version."""

from pathlib import Path

import pytest
from sluice_worker.cgroup import throttled_s
from sluice_worker.errors import Unauthorized
from sluice_worker.server.guards import Bearer


def test_a_bearer_shows_no_token() -> None:
    bearer = Bearer(["canary-token"])
    with pytest.raises(Unauthorized) as refused:
        bearer.check(b"Bearer canary-toke")
    assert "canary" not in f"{bearer!r} {bearer} {refused.value} {vars(refused.value)}"


@pytest.mark.parametrize("sent", [b"Bearer two", b"bearer  two ", b"Bearer one"])
def test_any_of_the_tokens_is_accepted(sent: bytes) -> None:
    Bearer(["one", "two"]).check(sent)


@pytest.mark.parametrize(
    "sent", [b"", b"two", b"Basic two", b"Bearer", b"Bearer \xff", b"Bearer tw"]
)
def test_anything_else_is_refused(sent: bytes) -> None:
    with pytest.raises(Unauthorized):
        Bearer(["one", "two"]).check(sent)


def test_a_rotated_token_is_taken_and_a_spoilt_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "token"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)  # as the kubelet does

    write("one")
    bearer = Bearer.of(path)
    assert bearer
    bearer.check(b"Bearer one")
    write("two")
    bearer.check(b"Bearer two")
    with pytest.raises(Unauthorized):
        bearer.check(b"Bearer one")
    write("\n")
    bearer.check(b"Bearer two")
    path.unlink()
    bearer.check(b"Bearer two")


@pytest.mark.parametrize(
    ("membership", "stat", "content"),
    [
        ("0::/\n", "cpu.stat", "usage_usec 9\nnr_throttled 2\nthrottled_usec 2500000\n"),
        ("0::/pod/c\n", "pod/c/cpu.stat", "throttled_usec 2500000\n"),
        ("4:cpu,cpuacct:/pod/c\n", "cpu,cpuacct/pod/c/cpu.stat", "throttled_time 2500000000\n"),
        ("4:cpu,cpuacct:/away\n", "cpu/cpu.stat", "nr_periods 1\nthrottled_time 2500000000\n"),
    ],
)
def test_throttling_is_read_from_both_cgroup_versions(
    tmp_path: Path, membership: str, stat: str, content: str
) -> None:
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / "root" / stat
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert throttled_s(tmp_path / "root", tmp_path / "membership") == 2.5


def test_without_a_quota_nothing_is_throttled(tmp_path: Path) -> None:
    assert throttled_s(tmp_path, tmp_path / "none") == 0.0
