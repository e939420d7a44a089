"""Bearer tokens: secrets stay hidden, any of the tokens is accepted, a rotated one is taken."""

from pathlib import Path

import pytest
from sluice_core.errors import Unauthorized
from sluice_frontend.http.guards import Bearer


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


def test_a_rotated_token_is_taken_and_a_spoilt_file_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    for _ in range(2):
        bearer.check(b"Bearer two")
    told = [vars(record)["reason"] for record in caplog.records]
    assert told == [f"{path} is empty"]
    path.unlink()
    bearer.check(b"Bearer two")


def test_each_of_several_tokens_has_a_salt_of_its_own_that_does_not_show_it() -> None:
    bearer = Bearer(["one", "two"])
    salts = {bearer.check(sent) for sent in (b"Bearer one", b"bearer one ", b"Bearer two")}
    assert len(salts) == 2
    assert not any(token in salt for salt in salts for token in ("one", "two"))
    assert Bearer(["three", "two", "one"]).check(b"Bearer one") in salts  # a file may grow
    alone = [Bearer([key]).check(f"Bearer {key}".encode()) for key in ("one", "two")]
    assert set(alone) == salts, "one may come and the other go, and neither finds the other's"
