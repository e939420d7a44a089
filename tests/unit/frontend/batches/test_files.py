"""Files: forms as they come in pieces, pages of names, and names that become paths."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_frontend.batches import routes, upload
from sluice_frontend.batches.files import BATCH, FILE, Files, is_id, new_id, page
from sluice_frontend.batches.upload import Form
from unit.frontend.batches.kept import Kept, Lines, kept

KIND = "multipart/form-data; boundary=x"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Kept]:
    async with kept(tmp_path, Lines(), runs=False) as found:
        yield found


def form(data: bytes, **fields: str) -> bytes:
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'
        for k, v in fields.items()
    ]
    head = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return "".join(parts).encode() + head.encode() + data + b"\r\n--x--\r\n"


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 600), max_size=8))
def test_a_file_is_the_same_however_its_form_is_cut(data: bytes, cuts: list[int]) -> None:
    body, read = form(data, purpose="batch"), Form(KIND)
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    found = b"".join(read.feed(body[a:b]) for a, b in zip(places, places[1:], strict=False))
    assert found == data
    asked = read.upload()
    assert (asked.file, asked.purpose, asked.seconds) == ("a.jsonl", "batch", None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "ends before its last boundary"),
        (form(b"a", purpose="batch")[:-6], "ends before its last boundary"),
        (b"no form", "is not multipart/form-data"),
        (form(b"a"), "purpose"),
        (form(b"a", purpose="other"), "purpose"),
        (form(b"a", purpose="batch", **{"expires_after[seconds]": "9"}), "expires_after"),
        (form(b"a", purpose="batch", **{"expires_after[seconds]": "x"}), "expires_after"),
        (form(b"a", purpose="b" * (1 << 17)), "beside its file"),
        (form(b"a", purpose="batch").replace(b'"file"', b'"other"'), "no file"),
        (form(b"a", purpose="batch")[:-7] + form(b"b"), "two files"),
    ],
)
def test_a_form_that_cannot_be_is_refused_with_a_sentence(body: bytes, said: str) -> None:
    def read() -> None:
        made = Form(KIND)
        made.feed(body)
        made.upload()

    with pytest.raises(RequestError, match=said):
        read()


@given(
    names=st.sets(st.text("ab", min_size=1, max_size=4), max_size=12),
    limit=st.integers(1, 5),
    is_newest_first=st.booleans(),
)
def test_pages_behind_each_other_are_all_names_in_order(
    names: set[str], limit: int, is_newest_first: bool
) -> None:
    wanted = [name for name in sorted(names, reverse=is_newest_first) if "bb" not in name]
    found, after, has_more = list[str](), None, True
    while has_more:
        some, has_more = page(
            names,
            lambda name: None if "bb" in name else name,
            after=after,
            limit=limit,
            is_newest_first=is_newest_first,
        )
        assert len(some) == limit or not has_more
        found += some
        after = found[-1] if found else None
    assert found == wanted


@given(st.text(max_size=60))
def test_no_name_of_others_becomes_a_path(name: str) -> None:
    assert not is_id(name, FILE)
    assert not is_id(f"{FILE}{name}", FILE) or set(name) <= set("0123456789abcdef")
    assert is_id(new_id(BATCH), BATCH)
    assert not is_id(new_id(BATCH), FILE)


def test_names_sort_by_their_time() -> None:
    made = [new_id(FILE) for _ in range(50)]
    assert made == sorted(made)


async def test_an_upload_over_the_limit_is_refused_and_leaves_nothing(
    server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(upload, "MAX_FORM_BYTES", 1000)
    assert (await server.upload(b"x" * 1000)).status_code == 200
    assert (await server.upload(b"x" * 3000)).status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        body = form(b"x" * 3000, purpose="batch")
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    headers = {"content-type": KIND}
    answer = await server.client.post("/v1/files", content=pieces(), headers=headers)
    assert answer.status_code == 413
    assert _num_files(server) == 1


def _num_files(server: Kept) -> int:
    """Files of the folder, each with its JSON."""
    return len(list((server.root / "files").iterdir())) // 2


async def test_an_upload_that_stops_or_is_one_too_many_is_refused(
    server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_UPLOADS", 1)
    is_begun, headers = asyncio.Event(), {"content-type": KIND}

    async def stuck() -> AsyncIterator[bytes]:
        yield form(b"x", purpose="batch")[:80]
        is_begun.set()
        await asyncio.sleep(30)

    asked = server.client.post("/v1/files", content=stuck(), headers=headers)
    first = asyncio.create_task(asked)
    await is_begun.wait()
    answers = [await server.upload(b"a") for _ in range(2)]
    assert 429 in {answer.status_code for answer in answers}
    assert (await first).status_code == 408
    assert (await server.upload(b"a")).status_code == 200


async def test_what_is_over_is_gone_and_swept(
    server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (await server.upload(b"a", **{"expires_after[seconds]": "3600"})).json()
    long = (await server.upload(b"b", purpose="user_data")).json()
    assert long["expires_at"] is None
    (server.root / "files" / ".left").touch()
    monkeypatch.setattr(time, "time", lambda: short["created_at"] + 3600.0)
    assert (await server.client.get(f"/v1/files/{short['id']}")).status_code == 404
    listed = (await server.client.get("/v1/files")).json()
    assert [each["id"] for each in listed["data"]] == [long["id"]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (*[long["id"]] * 2, False)
    monkeypatch.setattr(time, "time", lambda: short["created_at"] + 1e6)
    Files(server.root).sweep()
    names = {path.name for path in (server.root / "files").iterdir()}
    assert names == {long["id"], f"{long['id']}.json"}


async def test_another_key_sees_nothing_of_it(server: Kept) -> None:
    server.salt = "one"
    made = (await server.upload(b"a")).json()
    server.salt = "two"
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await server.client.request(method, f"/v1/files/{made['id']}{path}")
        assert answer.status_code == 404
    assert (await server.client.get("/v1/files")).json()["data"] == []
    server.salt = ""  # a server that asks for no keys
    found: Any = (await server.client.get("/v1/files")).json()["data"]
    assert [each["id"] for each in found] == [made["id"]]
