"""A request's target has one form: what decides of it here is what goes further."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_frontend.http.target import read_target

HOST = "gate:8000"


@pytest.mark.parametrize(
    ("raw_path", "path", "sent"),
    [
        (b"/v1/models", "/v1/models", b"/v1/models"),
        (b"/%76ersion", "/version", b"/version"),
        (b"/v1%2Fcompletions", "/v1/completions", b"/v1/completions"),
        (b"/v1/models/a%20b%C3%A4", "/v1/models/a bä", b"/v1/models/a%20b%C3%A4"),
        (b"/a:b@c;d=e", "/a:b@c;d=e", b"/a:b@c;d=e"),
        (b"http://gate:8000/version", "/version", b"/version"),
        (b"HTTP://GATE:8000/x", "/x", b"/x"),
        (b"http://gate:8000", "/", b"/"),
        (b"/v1/completions/", "/v1/completions/", b"/v1/completions/"),
    ],
)
def test_a_path_is_decoded_once_and_sent_in_one_form(
    raw_path: bytes, path: str, sent: bytes
) -> None:
    target = read_target(raw_path, b"a=%23&b", HOST)
    assert (target.path, target.raw_path, target.query) == (path, sent, b"a=%23&b")


@pytest.mark.parametrize(
    "raw_path",
    [
        *(b"@127.0.0.1:9999/x", b":99/x", b".x/", b"x", b"%2Fversion", b"*", b"", b"?", b"//x/y"),
        *(b"ftp://h/x", b"http://other/version", b"http://gate:8000@other/", b"https:/x", b"a:80"),
        *(
            b"/v1/completions#a",
            b"/a/../b",
            b"/a/%2e%2e/b",
            b"/.",
            b"/a/..",
            b"/a//b",
            b"/a%2F%2Fb",
        ),
        *(b"/a%2F%2Fb", b"/a%5Cb", b"/a%00b", b"/a%0d%0ab", b"/a%252Fb", b"/a%", b"/a%zz", b"/%ff"),
    ],
)
def test_a_target_with_another_reading_is_refused(raw_path: bytes) -> None:
    with pytest.raises(RequestError):
        read_target(raw_path, b"", HOST)


@pytest.mark.parametrize("query", [b"a#b", b"a b", b"\xff", b"a\x00"])
def test_a_query_that_is_not_escaped_is_refused(query: bytes) -> None:
    with pytest.raises(RequestError, match="query"):
        read_target(b"/x", query, HOST)


@given(st.binary(max_size=24), st.binary(max_size=8))
def test_whatever_is_sent_is_read_again_as_the_same(raw_path: bytes, query: bytes) -> None:
    try:
        target = read_target(raw_path, query, HOST)
    except RequestError:
        return
    assert target.path.startswith("/")
    assert unquote(target.raw_path.decode("ascii")) == target.path
    assert read_target(target.raw_path, target.query, "other") == target
