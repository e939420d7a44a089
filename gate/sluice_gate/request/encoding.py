"""A body that its client compressed, as the engine will read it. Pure."""

import zlib
from io import BytesIO

import zstandard
from sluice_core.errors import BodyTooLarge, RequestError

GZIP = 16 + zlib.MAX_WBITS
ZSTD_WINDOW = 8 << 20
"""Bytes that a decoder must hold at least (RFC 8878, 3.1.1.1.2), and here at most."""


def decoded(body: bytes, encoding: str, most: int) -> bytes | None:
    """The text in `body`; None for an encoding that is not known here.

    Raises RequestError if it is broken, BodyTooLarge if it has more than `most` bytes.
    """
    name = encoding.strip().lower()
    try:
        if name in ("", "identity"):
            return body
        if name in ("gzip", "x-gzip", "deflate"):
            text = _inflated(body, GZIP if "gzip" in name else zlib.MAX_WBITS, most)
        elif name == "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
            text = reader.stream_reader(BytesIO(body), read_across_frames=True).read(most + 1)
        else:
            return None
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"the body is not {name}") from error
    if len(text) > most:
        raise BodyTooLarge(f"the body is over the limit of {most} bytes when it is decoded")
    return text


def _inflated(body: bytes, window: int, most: int) -> bytes:
    reader = zlib.decompressobj(window)
    text = reader.decompress(body, most + 1)
    if len(text) <= most and (not reader.eof or reader.unused_data):
        raise RequestError("the body's compression has no end, or something follows it")
    return text
