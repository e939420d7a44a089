"""*rim*: a file on its way in: a form in parts, written to disk as it comes."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from sluice_core.bounded import count
from sluice_core.errors import BodyTooLarge, NotStored, RequestError, RequestTimeout
from starlette.requests import Request

from ..api.batches import FileUpload
from ..api.json_body import convert

MAX_FILE_BYTES = 200 << 20
MAX_FORM_BYTES = 64 << 10
"""Bytes of all that is no file: fields, headers, boundaries."""
LEAST_BYTES_S = 64 << 10
"""Bytes in each second that a client must send, beside --receive-timeout for the whole."""
MAX_NAME = 255
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients' faults are their own
_EVENTS = (
    *("part_begin", "part_data", "header_field", "header_value", "header_end"),
    *("headers_finished", "end"),
)


class Form:
    """A form: its fields, and one file, whose bytes are handed out as they come."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise RequestError("the body must be multipart/form-data with a boundary")
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._file = bytearray()
        self._into = bytearray()
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._num_bytes = 0
        on: Any = {f"on_{event}": getattr(self, f"_{event}") for event in _EVENTS}
        try:
            self._parser = MultipartParser(options[b"boundary"], on)
        except FormParserError as e:
            raise _unreadable(e) from e

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the body; the bytes of the file in it. Raises RequestError."""
        try:
            self._parser.write(data)
        except FormParserError as e:
            raise _unreadable(e) from e
        self._num_bytes += len(data) - len(self._file)
        if self._num_bytes > MAX_FORM_BYTES:
            raise RequestError(f"the form holds more than {MAX_FORM_BYTES} bytes beside its file")
        file = bytes(self._file)
        self._file.clear()
        return file

    def upload(self) -> FileUpload:
        """The fields; raises RequestError."""
        if not self.is_whole:
            raise RequestError("the body ends before its last boundary")
        if self.filename is None:
            raise RequestError("the form has no file", param="file")
        try:
            told: dict[str, object] = {k: bytes(v).decode() for k, v in self.fields.items()}
        except UnicodeDecodeError as e:
            raise RequestError("a field of the form is not UTF-8") from e
        seconds = "expires_after[seconds]"
        if seconds in told:
            told[seconds] = count(told[seconds]) or told[seconds]
        return convert({**told, "file": self.filename}, FileUpload)

    def _part_begin(self) -> None:
        self._disposition = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name != "file":
            self._into = self.fields[name] = bytearray()
        elif self.filename is not None:
            raise RequestError("the form has two files", param="file")
        else:
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:MAX_NAME]
            self._into = self._file

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._into += data[start:end]

    def _end(self) -> None:
        self.is_whole = True


def _unreadable(error: Exception) -> RequestError:
    return RequestError(f"the body is not multipart/form-data: {error}")


async def receive(request: Request, path: Path, timeout_s: float) -> FileUpload:
    """Write the file of a form to `path`, which is new, and tell its fields.

    Raises RequestError, BodyTooLarge, RequestTimeout, NotStored and ClientDisconnect.
    """
    form, num_bytes = Form(request.headers.get("content-type", "")), 0
    length = request.headers.get("content-length")
    most = MAX_FILE_BYTES + MAX_FORM_BYTES
    too_large = BodyTooLarge(f"the file is over the limit of {MAX_FILE_BYTES} bytes")
    if length is not None and count(length, most) is None:
        raise too_large
    start_s = asyncio.get_running_loop().time()
    try:
        with await asyncio.to_thread(path.open, "xb") as file:
            async with asyncio.timeout(timeout_s) as limit:
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    if num_bytes > most:
                        raise too_large
                    if data := form.feed(chunk):
                        await asyncio.to_thread(file.write, data)
                    limit.reschedule(start_s + timeout_s + num_bytes / LEAST_BYTES_S)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
    except TimeoutError as e:
        late = f"the body must bring {LEAST_BYTES_S} bytes in each second, after {timeout_s:g} s"
        raise RequestTimeout(late) from e
    except OSError as e:
        raise NotStored(f"the file cannot be written: {e.strerror}") from e
    return form.upload()
