"""What aiohttp is given of a connection's bytes: no more than it can be expected to act on.

Strategy: aiohttp takes what comes, and a client may send request after request while the first one is answered, a
head of any size, or one whose many small fields take far more memory than they have bytes. So what comes is handed
on in small pieces, but for a body whose length is known, and not at all while a request waits for the one before
it: what has come by then lies here as it is, and when there is more, nothing is read from the client until aiohttp
has begun with the next request.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from triglot.transports.rest.fields import MOST_HEAD_BYTES

PIECE_BYTES = 4096
"""Of what is no body of a known length; the shortest requests that it may hold take 50 times as much."""


class ReadAhead(web.RequestHandler):
    """Reads requests as they are taken. `begun` is to be called for each that aiohttp begins with."""

    __slots__ = ("_begun", "_content", "_handing_on", "_head_bytes", "_kept", "_length")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept = b""
        """What has come, and waits for a request to begin."""
        self._begun = 0
        self._content = EMPTY_PAYLOAD
        """The body of the request that is handled, or will be at once, and its length, if that is known."""
        self._length = 0
        self._handing_on = False
        self._head_bytes = 0
        """Of what has come since there was a request, or a part of a body."""

    def begun(self, request: web.BaseRequest) -> None:
        """All before this request has been answered."""
        self._begun += 1
        if self._content is not request.content:
            self._content, self._length = request.content, request.content_length or 0
        if self._kept:
            self.data_received(b"")

    def connection_lost(self, exc: BaseException | None) -> None:
        """See the base class."""
        super().connection_lost(exc)
        self._kept, self._content = b"", EMPTY_PAYLOAD  # The body refers to the connection.

    def resume_reading(self, *arguments: Any, **options: Any) -> None:
        """See the base class."""
        super().resume_reading(*arguments, **options)
        if self._kept and not self._handing_on:  # A body that ends has aiohttp call this, too.
            self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        """See the base class. Without data: more may be taken of what has come."""
        if self._close or self._force_close:
            self._kept = b""
        elif self._kept or len(data) > PIECE_BYTES or not self._takes():
            self._hand_on_pieces(data)
        else:
            self._hand_on(data)  # Without data, too: aiohttp itself may have kept something.

    def _hand_on_pieces(self, data: bytes) -> None:
        if not data:
            super().data_received(data)
        came, held = self._kept + data, bool(self._kept)
        at = 0
        self._handing_on = True
        while at < len(came) and self._takes():
            piece = came[at : at + self._room()]
            at += len(piece)
            self._hand_on(piece)
        self._handing_on = False
        # What follows a refused head is read and dropped: unread, it would have the socket reset with the answer.
        self._kept = came[at:] if self._head_bytes <= MOST_HEAD_BYTES else b""
        if self.transport is None or self._reading_paused:
            return
        if held and self._kept:
            self.transport.pause_reading()
        elif held:
            self.transport.resume_reading()

    def _takes(self) -> bool:
        if self._reading_paused or self._head_bytes > MOST_HEAD_BYTES:
            return False
        return self._request_count <= self._begun or self._missing() > 0

    def _missing(self) -> int:
        """Bytes of the body of known length that is on its way."""
        return self._length - self._content.total_bytes

    def _room(self) -> int:
        """For what is handed on at once."""
        missing = self._missing()
        return missing if self._request_count > self._begun else max(PIECE_BYTES, missing)

    def _hand_on(self, piece: bytes) -> None:
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
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse_head()

    def _refuse_head(self) -> None:
        """As aiohttp refuses what is no request."""
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        text = f"the head of the request is larger than {MOST_HEAD_BYTES} bytes"
        wrong = _ErrInfo(status=status, exc=HttpProcessingError(code=status, message=text), message=text)
        self._request_count += 1
        self._messages.append((wrong, EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
