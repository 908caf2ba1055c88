"""Limits what aiohttp is given of a connection's bytes.

Strategy: aiohttp parses everything it receives, and a client may pipeline many requests, or send a head of any
size, or one whose many small fields take far more memory than bytes. So bytes are passed on in small pieces,
except for bodies of known length, and not at all while a pipelined request waits for the one before it: its
bytes are kept here, and beyond these nothing is read from the client until aiohttp has begun the next request.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from triglot.transports.rest.fields import MAX_HEAD_BYTES

PIECE_BYTES = 4096
"""Bytes passed on at a time, outside of bodies of known length.

The shortest requests in them take 50 times as much.
"""


class ReadAhead(web.RequestHandler):
    """An aiohttp connection with limited read-ahead.

    `begun` has to be called for each request that aiohttp begins.
    """

    __slots__ = ("_begun", "_content", "_head_bytes", "_kept", "_length", "_passing_on", "discards")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.discards = False
        """Whether received bytes are discarded, because the last response is being sent."""
        self._kept = b""
        """Received bytes that wait for a request to begin."""
        self._begun = 0
        self._content = EMPTY_PAYLOAD
        """The body of the current request, or of the one that begins next, and its length, if known."""
        self._length = 0
        self._passing_on = False
        self._head_bytes = 0
        """Bytes received since the last complete head, or part of a body."""

    def begun(self, request: web.BaseRequest) -> None:
        """Note that this request begins: all before it have been answered."""
        self._begun += 1
        if self._content is not request.content:
            self._content, self._length = request.content, request.content_length or 0
        if self._kept:
            self.data_received(b"")

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._kept, self._content = b"", EMPTY_PAYLOAD  # The body refers to the connection.

    def resume_reading(self, *arguments: Any, **options: Any) -> None:
        super().resume_reading(*arguments, **options)
        if self._kept and not self._passing_on:  # aiohttp also calls this when a body ends.
            self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        """See the base class. With b"": pass on more of what was kept."""
        if self._close or self._force_close or self.discards:
            self._kept = b""
        elif self._kept or len(data) > PIECE_BYTES or not self._accepts():
            self._pass_on_pieces(data)
        else:
            self._pass_on(data)  # With b"" too: aiohttp itself may have kept something.

    def _pass_on_pieces(self, data: bytes) -> None:
        if not data:
            super().data_received(data)
        received, held = self._kept + data, bool(self._kept)
        at = 0
        self._passing_on = True
        while at < len(received) and self._accepts():
            piece = received[at : at + self._room()]
            at += len(piece)
            self._pass_on(piece)
        self._passing_on = False
        # After a rejected head, bytes are discarded: unread ones would reset the connection, and the response with
        # it.
        self._kept = received[at:] if self._head_bytes <= MAX_HEAD_BYTES else b""
        if self.transport is None or self._reading_paused:
            return
        if held and self._kept:
            self.transport.pause_reading()
        elif held:
            self.transport.resume_reading()

    def _accepts(self) -> bool:
        if self._reading_paused or self._head_bytes > MAX_HEAD_BYTES:
            return False
        return self._request_count <= self._begun or self._missing() > 0

    def _missing(self) -> int:
        """Return how many bytes are missing of the body of known length that is being received."""
        return self._length - self._content.total_bytes

    def _room(self) -> int:
        """Return how many bytes may be passed on at once."""
        missing = self._missing()
        return missing if self._request_count > self._begun else max(PIECE_BYTES, missing)

    def _pass_on(self, piece: bytes) -> None:
        count, received = self._request_count, self._content.total_bytes
        super().data_received(piece)
        if self._request_count > count:
            self._head_bytes = 0
            message, content = self._messages[-1]
            is_next = self._current_request is None and self._request_count == self._begun + 1
            if is_next and not content.is_eof() and not isinstance(message, _ErrInfo):
                self._content, self._length = content, int(message.headers.get(hdrs.CONTENT_LENGTH, 0))
        elif self._content.total_bytes > received:
            self._head_bytes = 0
        else:
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def _refuse_head(self) -> None:
        """Reject the request as aiohttp rejects an invalid one."""
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        text = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
        wrong = _ErrInfo(status=status, exc=HttpProcessingError(code=status, message=text), message=text)
        self._request_count += 1
        self._messages.append((wrong, EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
