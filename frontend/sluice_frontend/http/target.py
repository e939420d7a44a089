"""The target of a request, read once and written in one form. Pure.

Servers differ in what they make of `%2F`, `//`, `/../`, a fragment or a whole URL. Keys, counts and
routes are decided by the path. So whoever is behind us gets the path as we read it.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from sluice_core.errors import RequestError

_PATH_CHARS = "/-._~!$&'()*+,;=:@"
"""Characters of a path that stand for themselves (RFC 3986, 3.3)."""
_WHOLE = re.compile(rb"(?i:https?)://([^/?#]*)(.*)", re.DOTALL)
_QUERY = re.compile(rb"[!$-~]*")  # printable ASCII without " and #
_UNCLEAR = re.compile(r"[\x00-\x1f\x7f\\]|//|/\.\.?(?=/|$)")
_NO_TARGET = "the request's target must be a path that begins with /, or a URL of this host"


class Target(NamedTuple):
    """Where a request goes. `path`: with each escape decoded; `query`: as it came."""

    path: str
    query: bytes

    @property
    def raw_path(self) -> bytes:
        """The path with the escapes that it needs, and no others."""
        return quote(self.path, _PATH_CHARS).encode()


def read_target(raw_path: bytes, query: bytes, host: str) -> Target:
    """The target of a request line, whose `Host` is `host`. Raises RequestError."""
    if whole := _WHOLE.fullmatch(raw_path):
        if whole[1].decode("latin-1").lower() != host.lower():
            raise RequestError("the target's host and the Host header differ")
        raw_path = whole[2] or b"/"
    if not raw_path.startswith(b"/") or b"#" in raw_path:
        raise RequestError(_NO_TARGET)
    try:
        path = unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError as error:
        raise RequestError("the request's path is not UTF-8") from error
    if _UNCLEAR.search(path) or "%" in path:
        raise RequestError("the request's path holds an escape or a segment with two meanings")
    if not _QUERY.fullmatch(query):
        raise RequestError("the request's query holds a character that must be escaped")
    return Target(path, query)
