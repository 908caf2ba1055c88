"""The `Exchange` of a request over aiohttp."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import PayloadEncodingError
from aiohttp.payload import Payload

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Scattered
from triglot.transports.certificates import names_of
from triglot.transports.rest.exchange import Exchange, RequestBody
from triglot.transports.rest.fields import Fields


class _Pieces(Payload):
    """A response body in pieces, which are sent without joining them."""

    def __init__(self, body: Scattered) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """See the base class. The first piece is sent with the headers."""
        for piece in self._value.pieces:
            await writer.write(piece)


class AiohttpBody(RequestBody):
    """The body of an aiohttp request."""

    __slots__ = ("_content", "_expected", "_http")

    def __init__(self, http: web.BaseRequest) -> None:
        self.length = http.content_length if http.can_read_body else 0
        self._http = http
        self._content = http.content
        self._expected = http.version >= HttpVersion11 and "Expect" in http.headers

    def complete_body(self) -> bytes | None:
        content = self._content
        if not self._http.can_read_body:
            return b""
        if not content.is_eof() or content.exception() is not None:
            return None
        return content.read_nowait()

    async def read(self) -> bytes:
        content = self._content
        try:
            if self._expected:
                self._expected = False
                await self._send_continue()
            while True:
                # A body of known length arrives in the pieces of the socket. HTTP chunks may be tiny, and are read
                # many at a time.
                chunk = await content.readany() if self.length is None else (await content.readchunk())[0]
                if chunk or content.at_eof():
                    return chunk
        except (web.RequestPayloadError, PayloadEncodingError) as error:
            raise InvalidArgument(f"the request body is invalid: {error}") from None

    async def _send_continue(self) -> None:
        """Send 100 (Continue) to a client that waits for it before it sends the body."""
        writer = self._http.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # Only bytes of the response itself are counted.
        await writer.drain()


class AiohttpExchange(Exchange):
    """A request over aiohttp; `answer` is the response that its handler has to return."""

    __slots__ = ("_http", "_remote", "answer")

    def __init__(self, http: web.BaseRequest, remote: str) -> None:
        fields = [(name.lower(), value) for name, value in http.headers.items()]
        body = AiohttpBody(http)
        super().__init__(http.method, http.raw_path, fields, body, is_http10=http.version == HttpVersion10)
        self._http = http
        self._remote = remote
        self.answer: web.StreamResponse | None = None

    @property
    def remote(self) -> str:
        return self._remote

    def certificate_names(self) -> Sequence[str]:
        return () if self._http.transport is None else names_of(self._http.transport)

    def respond(self, status: int, fields: Fields, body: bytes | Scattered) -> None:
        given = _Pieces(body) if isinstance(body, Scattered) else body or None
        self.answer = web.Response(body=given, status=status, headers=fields)
        if self.answer.headers.get("Connection") == "close":
            self.answer.force_close()

    async def begin(self, status: int, fields: Fields) -> None:
        answer = self.answer = web.StreamResponse(status=status, headers=fields)
        if self.is_http10:
            answer.force_close()
        else:
            answer.enable_chunked_encoding()
        writer = await answer.prepare(self._http)
        self.begun = True
        # aiohttp 3.12 and later would hold the headers back until the first chunk.
        if writer is not None and hasattr(writer, "send_headers"):
            writer.send_headers()

    async def write(self, chunk: bytes) -> None:
        assert self.answer is not None
        await self.answer.write(chunk)

    async def finish(self) -> None:
        assert self.answer is not None
        await self.answer.write_eof()

    def abort(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()
