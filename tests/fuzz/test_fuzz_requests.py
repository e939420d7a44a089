"""Request lines, headers and bytes of strangers, at a real gate on a raw socket."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from fuzz.budget import fuzzed, spend
from fuzz.front import Front, front
from fuzz.words import words
from hypothesis import given
from hypothesis import strategies as st
from strangers.stage import key_file

LIMIT_S = 0.5
"""So long an answer may take; a request that is not whole gets none."""
OTHER, ADMIN = "OTHER", "ADMIN"
"""In a target: the port of another host, and of the gate's own admin port."""
METHODS = words("GET POST PUT PATCH DELETE HEAD OPTIONS TRACE CONNECT get G@T")
OTHERS = [
    f"{start}127.0.0.1:{port}/"
    for start in words("@ :@ // http:// x@ http://a@")
    for port in (OTHER, ADMIN)
]
STARTS = [
    *("/", "/", "/", "", *OTHERS),
    *words("* .x/ x // \\ %2F /%2e%2e/ /..;/ ? # :99/ @ http://localhost/ HTTP://h/ ftp://h/"),
    *words("http:/// http://[::1]/ http://"),
]
PATHS = words(
    "v1/completions v1/chat/completions version %76ersion healthz metrics readyz invocations",
    "api/delete v1/runtime_config v1/models tokenize openapi.json",
)
ENDS = ["", "", "\x7f", *words("?a=1 #a ?a=%00 / /../version ;x=1 % %zz %2500 ?# ??")]
NAMES = words(
    "host content-length transfer-encoding connection upgrade expect te trailer",
    "x-slo-ttft-ms x-slo-tpot-ms x-request-id authorization content-type origin",
    "content-encoding accept-encoding access-control-request-method cookie range",
    "endpoint-load-metrics-format x-forwarded-for x-http-method-override x-original-url",
)
VALUES = [
    *words("0 -1 1e308 NaN inf 1e-320 chunked gzip close upgrade 100-continue Bearer PATCH"),
    *words("application/json multipart/form-data text/plain websocket bytes=0- /version \u00e9"),
    *("", "\x0b", "9" * 400, "a" * 9000, "Bearer x", "identity, chunked"),
]
BODIES = (b"", b"{}", b"[", b'{"prompt":"a"}', b'{"cap":1,"epoch":99}', b"0\r\n\r\n")

header = st.tuples(st.sampled_from(NAMES) | st.text(max_size=6), st.sampled_from(VALUES))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A request that is nearly right, as bytes; sometimes with some others in it."""
    target = "".join(draw(st.sampled_from(each)) for each in (STARTS, PATHS, ENDS))
    version = draw(st.sampled_from(["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/2", "HTTP/1.1 ", ""]))
    body = draw(st.sampled_from(BODIES))
    headers = draw(st.lists(header, max_size=4))
    if draw(st.integers(0, 9)):
        headers += [("Host", "localhost"), ("Content-Length", str(len(body)))]
    head = f"{draw(st.sampled_from(METHODS))} {target} {version}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("x-stranger", "1")])
    sent = head.encode("latin-1", "replace") + b"\r\n" + body
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(sent)))
        sent = sent[:at] + draw(st.binary(max_size=8)) + sent[at:]
    return sent


def answered(address: tuple[str, int], sent: bytes) -> bytes:
    """The first bytes of what comes back."""
    with suppress(OSError), socket.create_connection(address, LIMIT_S) as connection:
        connection.settimeout(LIMIT_S)
        connection.sendall(sent)
        return connection.recv(1 << 16)
    return b""


@contextmanager
def other_host() -> Iterator[socket.socket]:
    """A port where nobody is to come."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setblocking(False)
        yield listener


def was_asked(listener: socket.socket) -> bool:
    """Whether somebody came since the last look."""
    with suppress(BlockingIOError):
        listener.accept()[0].close()
        return True
    return False


def check(made: Front, other: socket.socket, sent: bytes) -> None:
    """No 500, no traceback, no other host; the engine is asked for a path of its own."""
    gate = made.living()
    for name, port in ((OTHER, other.getsockname()[1]), (ADMIN, gate.admin[1])):
        sent = sent.replace(name.encode(), str(port).encode())
    first = answered(gate.address, sent).partition(b"\r\n")[0]
    assert b" 500" not in first, sent
    assert not was_asked(other), sent
    made.judge(sent)
    for seen in made.reached():
        assert seen.target.startswith(b"/"), (sent, seen)
        assert seen.header("host") == f"127.0.0.1:{made.engine.port}", (sent, seen)


def test_no_request_line_brings_a_500_or_another_host(tmp_path: Path) -> None:
    with front(tmp_path) as made, other_host() as other:

        @fuzzed
        @given(lines())
        def holds(sent: bytes) -> None:
            check(made, other, sent)

        spend(holds)


def is_open(sent: bytes) -> bool:
    """Whether a request needs no key: the version, and the preflight of a browser, which cannot
    bring one (Fetch, 4.8)."""
    return sent.startswith((b"GET /version", b"OPTIONS "))


def test_nothing_of_a_stranger_without_a_key_reaches_the_engine(tmp_path: Path) -> None:
    flags = key_file(tmp_path, ["a-key-that-nobody-guesses"])
    with front(tmp_path, *flags) as made:

        @fuzzed
        @given(lines().filter(lambda sent: not is_open(sent)))
        def holds(sent: bytes) -> None:
            answered(made.living().address, sent)
            made.judge(sent)
            assert not made.reached(), sent

        spend(holds)
