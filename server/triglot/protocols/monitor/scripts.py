"""The two scripts that pages made for grps load (grps 3.1)."""

from __future__ import annotations

import gzip
from email.utils import parsedate_to_datetime
from functools import partial

from triglot.core.call import Call
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.monitor.openapi import JS
from triglot.protocols.rows import Route

PATHS = {"jQuery": "/grps/v1/js/jquery_min", "Flot": "/grps/v1/js/flot_min"}
LAST_MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


def script_routes() -> list[Route]:
    """Returns an empty script for each library: this server's page draws its charts itself."""
    routes = []
    for library, path in PATHS.items():
        script = (
            f"// {library} is not here: the page of this server needs no library.\n"
            "// The data of its charts is at /grps/v1/monitor/series?name=NAME\n"
        ).encode()
        encode = partial(_encode, script, gzip.compress(script, mtime=0))
        routes.append(Route("GET", path, Operation.PUBLIC, lambda http: http, _read, encode, documented=(JS,)))
    return routes


async def _read(http: HttpRequest, _: Call) -> HttpRequest:
    return http


def _encode(script: bytes, zipped: bytes, _: HttpRequest, http: HttpRequest) -> HttpResponse:
    headers = {"Last-Modified": LAST_MODIFIED, "Vary": "Accept-Encoding"}
    kind = "application/javascript"
    if _is_not_modified(http.headers.get("if-modified-since", "")):
        return HttpResponse(b"", 304, kind, headers)
    if takes_gzip(http):
        return HttpResponse(zipped, 200, kind, {**headers, "Content-Encoding": "gzip"})
    return HttpResponse(script, 200, kind, headers)


def _is_not_modified(since: str) -> bool:
    """Whether the client's copy is as new as `LAST_MODIFIED`."""
    try:
        return parsedate_to_datetime(since) >= parsedate_to_datetime(LAST_MODIFIED)
    except (TypeError, ValueError):
        return False  # Not a date, or without a time zone.


def takes_gzip(http: HttpRequest) -> bool:
    """Whether the client accepts gzip."""
    for coding in http.headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = coding.partition(";")
        if name.strip() in ("gzip", "x-gzip"):
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
