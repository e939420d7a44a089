"""HTTP/1.1 connections with deadlines: slow senders, slow readers, an age limit, and a number.

uvicorn has none of these by default. They are in the protocol object, where they cost nothing per
token: the transport's own write buffer shows a stalled reader.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import h11
from sluice_core.errors import RequestError
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ..api.sse import error_body
from ..config import ServerConfig
from .clients import has_too_many, peer_of

log = logging.getLogger(__name__)
MAX_HEADER_BYTES = 32 << 10
HEADER_S = 10.0
"""Most seconds for a request's headers, which come in one or a few pieces."""
READ_SHARE = 8
MOST_TO_READ = 512 << 10
"""Bytes. In each --write-timeout a reader must take 1 / READ_SHARE of those unread when it first
stopped, or this many. Else one byte each time would keep the connection for ever."""
TELL_S = 60.0
"""Seconds between two log lines about connections at their limit."""
NUM_CHUNKS = 1000
MIN_CHUNK_BYTES = 64
"""Least mean size of NUM_CHUNKS in a row: 1 MiB in chunks of one byte held the loop for 5.8 s."""
IN_CHUNKS = b"\r\nTransfer-Encoding: chunked\r\n"
"""As h11 writes it. No value of another header has the end of a line in it."""
LIFE = "life"
"""Key in the ASGI scope's state: when the connection was made (loop time) and its age limit, s."""


Deadline = Literal["receive", "write"]
OnCut = Callable[[Deadline], None]
"""Called for each connection that missed a deadline."""


class Connections:
    """A port's connections by address, and those on which no request is under way, the longest wait
    first.

    A lone address may hold `most`, and less beside others. A newcomer for which that is too many
    replaces the first of the address that holds most. So probes and new clients get in, however
    many connections one client holds open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_of: Counter[str] = Counter()
        self._idle: dict[str, OrderedDict[Connection, None]] = {}
        self._told_s = float("-inf")

    def join(self, connection: "Connection") -> None:
        """Note that it waits for a request from now on."""
        idle = self._idle.setdefault(connection.address, OrderedDict())
        idle[connection] = None
        idle.move_to_end(connection)

    def leave(self, connection: "Connection") -> None:
        """Note that it waits no longer."""
        if idle := self._idle.get(connection.address):
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.address]

    def add(self, connection: "Connection", now_s: float) -> None:
        """Add a newcomer. It is closed itself if it is too many and all others are busy."""
        self._num_of[connection.address] += 1
        self.join(connection)
        num_all = self._num_of.total()
        if num_all <= self._most:
            return  # nobody has too many
        largest = max(self._idle, key=self._num_of.__getitem__)
        if not has_too_many(self._num_of[largest], num_all, self._most):
            return
        longest = next(iter(self._idle[largest]))
        self.leave(longest)
        longest.transport.close()
        if now_s >= self._told_s + TELL_S:
            self._told_s = now_s
            log.warning("connections at their limit", extra={"max_connections": self._most})

    def remove(self, connection: "Connection") -> None:
        """Forget one that is gone."""
        self.leave(connection)
        self._num_of[connection.address] -= 1
        if not self._num_of[connection.address]:
            del self._num_of[connection.address]


class Incoming(h11.Connection):
    """Received bytes; a body in tiny chunks, or with two lengths, is a protocol error."""

    problem = "the request is not valid HTTP/1.1"
    _is_chunked = False
    _num_chunks = 0
    _num_bytes = 0
    _in_chunks = False  # our answer goes out in chunks

    def next_event(self) -> Any:
        """As h11's. Raises h11.RemoteProtocolError, and `problem` is what to say of it."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            self._is_chunked = b"transfer-encoding" in names
            self._num_chunks = self._num_bytes = 0
            # A proxy before us may find the body's end by the other header (RFC 9112, 6.3).
            if self._is_chunked and b"content-length" in names:
                self.problem = "Content-Length and Transfer-Encoding contradict each other"
                raise h11.RemoteProtocolError(self.problem)
        elif isinstance(event, h11.Data) and self._is_chunked:
            self._count(len(event.data))
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """As h11's. A piece of a chunked body changes no state, so it is framed here: each token is
        one, and h11 takes 5.6 us for it."""
        if self._in_chunks and type(event) is h11.Data and event.data:
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"]
        parts = super().send_with_data_passthrough(event)
        if type(event) is not h11.Data:
            is_answer = type(event) is h11.Response
            self._in_chunks = is_answer and IN_CHUNKS in b"".join(parts or ())
        return parts

    @property
    def is_in_body(self) -> bool:
        """True if more of a body is to come."""
        return self.their_state is h11.SEND_BODY

    def _count(self, num_bytes: int) -> None:
        self._num_chunks += 1
        self._num_bytes += num_bytes
        if self._num_chunks < NUM_CHUNKS:
            return
        if self._num_bytes < NUM_CHUNKS * MIN_CHUNK_BYTES:
            self.problem = f"the body's chunks are smaller than {MIN_CHUNK_BYTES} bytes on average"
            raise h11.RemoteProtocolError(self.problem)
        self._num_chunks = self._num_bytes = 0


class Connection(H11Protocol):
    """One client connection."""

    limits: ServerConfig
    on_cut: OnCut
    peers: Connections

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: Incoming = Incoming(h11.SERVER, MAX_HEADER_BYTES)
        self.address = ""
        self._heard_s = 0.0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Jitter the age limit; else clients that came together leave together."""
        super().connection_made(transport)
        age_s = self.limits.connection_max_age * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
        self._heard_s = now_s = self.loop.time()
        self.app_state = {**self.app_state, LIFE: (now_s, age_s)}
        self._arm_receive(self.limits.receive_timeout)  # clients may dial ahead
        self.address = peer_of(transport.get_extra_info("peername"))
        self.peers.add(self, now_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.peers.remove(self)
        self._receive_timer = _cancelled(self._receive_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the receive deadlines with a request's first byte: to its headers', to its last."""
        if self._has_nothing_begun():  # the time to dial ahead ends
            self._receive_timer = _cancelled(self._receive_timer)
        if self._receive_timer is None:
            self._arm_receive()
        super().data_received(data)
        if not self._is_idle():
            self.peers.leave(self)
        # The cycle of an earlier, answered request says nothing about this one.
        is_whole = self.cycle and not self.cycle.more_body and not self.cycle.response_complete
        if is_whole or self._has_nothing_begun():
            self._receive_timer = _cancelled(self._receive_timer)
        if is_whole and len(self.conn.trailing_data[0]) <= MAX_HEADER_BYTES:
            self.flow.resume_reading()  # which the next request pauses: or no leaving would be seen

    def _has_nothing_begun(self) -> bool:
        """True if all received bytes belong to an answered request."""
        return self._is_idle() and not self.conn.is_in_body and not self.conn.trailing_data[0]

    def pause_writing(self) -> None:
        """Cut a client that has stopped reading, unless it continues."""
        super().pause_writing()
        if self._write_timer is None:
            self._arm_write()

    def resume_writing(self) -> None:
        self._write_timer = _cancelled(self._write_timer)
        super().resume_writing()
        self._watch_last_bytes()

    def on_response_complete(self) -> None:
        """uvicorn has closed a connection that takes no other request."""
        self._heard_s = self.loop.time()
        super().on_response_complete()
        # Else another request was there already, or none may follow.
        if self._is_idle() and not self.transport.is_closing():
            self.peers.join(self)
        self._watch_last_bytes()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_last_bytes()

    def _watch_last_bytes(self) -> None:
        """Keep a closed transport until its last bytes are read, few as they may be."""
        is_unwatched = self.transport.is_closing() and self._write_timer is None
        if is_unwatched and self.transport.get_write_buffer_size():
            self._arm_write()

    def _arm_write(self, num_first: int | None = None) -> None:
        """`num_first`: bytes that were unread when the reader first stopped; None: it has now."""
        left = self.transport.get_write_buffer_size()
        # Readers that stopped together are not cut together: 600 held the loop for half a second.
        wait_s = self.limits.write_timeout * random.uniform(1, 1.1)  # noqa: S311 - no secret
        self._write_timer = self.loop.call_later(wait_s, self._check_read, num_first or left, left)

    def _check_read(self, num_first: int, num_before: int) -> None:
        """A large answer may take long if the client reads a part of it in each interval."""
        num_read = num_before - self.transport.get_write_buffer_size()
        if num_read >= max(min(num_first // READ_SHARE, MOST_TO_READ), 1):
            self._arm_write(num_first)
        else:
            self._cut("write")

    @property
    def heard_s(self) -> float:
        """Loop time at which its client connected or was last answered; now during a request."""
        return self._heard_s if self._has_nothing_begun() else self.loop.time()

    def close_if_idle(self) -> None:
        """Close between two requests; a request under way, or begun, gets its answer."""
        if self._has_nothing_begun():
            self.shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Clients that offer HTTP/2 are answered in HTTP/1.1: nothing is amiss."""
        log.debug("an upgrade was offered and not taken")

    def send_400_response(self, msg: str) -> None:
        """Answer with our error body, if one can still be sent."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = error_body(RequestError(self.conn.problem))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        start = h11.Response(status_code=400, headers=[*headers.items()], reason="Bad Request")
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arm_receive(self, limit_s: float | None = None) -> None:
        """`limit_s`: None for what the headers or the body may take."""
        is_body = self.conn.is_in_body
        if limit_s is None:
            limit_s = self.limits.receive_timeout
            limit_s = limit_s if is_body else min(limit_s, HEADER_S)
        self._receive_timer = self.loop.call_later(limit_s, self._receive_is_late, is_body)

    def _receive_is_late(self, is_body: bool) -> None:
        """Cut headers that do not end. A body that does not end is answered 408, and cut here if
        its request was already answered."""
        self._receive_timer = None
        if self.conn.is_in_body and not is_body:
            self._arm_receive()
        elif self._is_idle() and not self.transport.is_closing():
            self._cut("receive")

    def _cut(self, deadline: Deadline) -> None:
        type(self).on_cut(deadline)
        self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel `timer`; the None to put in its place."""
    if timer is not None:
        timer.cancel()
    return None


def connection_class(limits: ServerConfig, on_cut: OnCut, max_connections: int) -> type[Connection]:
    """A port's connection type with its limits, as uvicorn wants a class."""
    connections = Connections(max_connections)
    members = {"limits": limits, "on_cut": staticmethod(on_cut), "peers": connections}
    return type("BoundConnection", (Connection,), members)
