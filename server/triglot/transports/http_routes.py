"""Which row a request is for.

Strategy: aiohttp's router looks at one pattern after the other. What it has found is remembered by the path as it
was sent, since clients send few different ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from aiohttp import HttpVersion11, web

from triglot.transports.http_errors import error_body

Handler = Callable[[Mapping[str, str], web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers a request whose path has these variables."""
Found = tuple[Handler, Mapping[str, str]]
MOST_KNOWN = 1024
LONGEST_KNOWN = 512
"""Characters of a path that is remembered."""


class Refused(Exception):
    """No row is asked: `status` and `headers` say why."""

    def __init__(self, error: web.HTTPException) -> None:
        super().__init__(error.reason)
        self.status = error.status
        self.headers = {name: value for name, value in error.headers.items() if name == "Allow"}

    @property
    def answer(self) -> web.Response:
        """aiohttp's own refusal in the protocols' form."""
        body = error_body(str(self))
        return web.Response(body=body, status=self.status, content_type="application/json", headers=self.headers)


class Router:
    """Finds handlers by verb and path, with aiohttp's rules."""

    def __init__(self) -> None:
        self._dispatcher = web.UrlDispatcher()
        self._known: dict[tuple[str, str], Found] = {}

    def add(self, verb: str, path: str, handler: Handler) -> None:
        """A row; of rows that fit a request the first one with the longest constant beginning is taken."""
        # The dispatcher only keeps it.
        self._dispatcher.add_route(verb, path, cast("Any", handler))

    def known(self, http: web.BaseRequest) -> Found | None:
        """What was found for such a request before, if that is remembered."""
        return self._known.get((http.method, http.raw_path.partition("?")[0]))

    async def find(self, http: web.BaseRequest) -> Found:
        """Raises `Refused`: there is no such path, or not with this verb."""
        # The method and the path are all that the dispatcher asks for.
        match = await self._dispatcher.resolve(cast("web.Request", http))
        refusal = match.http_exception
        if refusal is not None:
            raise Refused(refusal)
        found = cast("Handler", match.handler), dict(match)
        path = http.raw_path.partition("?")[0]
        if len(path) <= LONGEST_KNOWN:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[http.method, path] = found
        return found


async def go_on(http: web.BaseRequest, expected: str) -> None:
    """Tell a client that waits for it to send the body. Raises `Refused` for anything else that it expects."""
    if http.version == HttpVersion11:
        if expected.lower() != "100-continue":
            raise Refused(web.HTTPExpectationFailed())
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # The answer's own bytes are counted.
        await http.writer.drain()
