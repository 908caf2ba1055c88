"""Customised HTTP (grps 3.6): converts requests and responses to and from Flask's.

Flask is imported only if a project uses it.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from triglot.core.errors import MissingDependency
from triglot.core.http import HttpRequest, HttpResponse

if TYPE_CHECKING:
    import flask

INSTALL = "pip install flask"
_ORIGIN = re.compile(r"^[A-Za-z]+://[^/?]*")
"""The origin that precedes the path in a request to a proxy."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_NO_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_OF_THE_CONNECTION = ("connection", "content-length", "transfer-encoding")


def require_flask(what: str) -> None:
    """Raise `MissingDependency` if Flask is not installed; `what` needs it."""
    try:
        import flask  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingDependency(f"{what} needs flask, which is not installed; run: {INSTALL}") from error


def flask_request(request: HttpRequest) -> flask.Request:
    """Return the request as a Flask request."""
    from flask import Request  # noqa: PLC0415

    return Request(_environ(request))


def _environ(request: HttpRequest) -> dict[str, Any]:
    """Return the WSGI environment of the request (PEP 3333), in which all text is Latin-1."""
    path, _, query = _ORIGIN.sub("", request.target).partition("?")
    headers = {name.lower(): _latin(value) for name, value in request.headers.items()}
    host, _, port = headers.get("host", "localhost").rpartition(":")
    if not port.isdigit():
        host, port = headers.get("host", "localhost"), "80"
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.verb,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": _latin(query),
        "REQUEST_URI": _latin(request.target),
        "SERVER_NAME": host,
        "SERVER_PORT": port,
        "SERVER_PROTOCOL": "HTTP/1.1",
        **({"REMOTE_ADDR": request.remote} if request.remote else {}),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        # The body is complete, however it was sent.
        "CONTENT_LENGTH": str(len(request.body)),
    }
    for name, value in headers.items():
        if name == "content-type":
            environ["CONTENT_TYPE"] = value
        elif name not in _OF_THE_CONNECTION:
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    return environ


def _latin(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def http_response(answer: Any) -> HttpResponse:
    """Return the response for an argument of `set_http_response`.

    str is text/plain, bytes are application/octet-stream, a tuple is (str or bytes, status, dict of headers).
    Raise `ValueError` for anything but these and a Flask response.
    """
    if isinstance(answer, str):
        return HttpResponse(answer.encode(), 200, "text/plain")
    if isinstance(answer, bytes):
        return HttpResponse(answer, 200, "application/octet-stream")
    if isinstance(answer, tuple) and len(answer) == 3:
        body, status, headers = answer
        if not isinstance(body, str | bytes) or not isinstance(status, int) or not isinstance(headers, dict):
            kinds = ", ".join(type(item).__name__ for item in answer)
            raise ValueError(f"set_http_response: expected (str or bytes, int, dict), got ({kinds})")
        encoded = body.encode() if isinstance(body, str) else body
        return _response(encoded, int(status), [(str(name), str(value)) for name, value in headers.items()])
    # It can be a Flask response only if Flask was imported.
    if "flask" in sys.modules:
        from flask import Response  # noqa: PLC0415

        if isinstance(answer, Response):
            answer.direct_passthrough = False
            return _response(answer.get_data(), answer.status_code, answer.headers.items())
    raise ValueError(
        "set_http_response: expected str, bytes, (str or bytes, status, headers) or a flask.Response, "
        f"got {type(answer).__name__}"
    )


def _response(body: bytes, status: int, fields: Iterable[tuple[str, str]]) -> HttpResponse:
    if not 200 <= status <= 599:
        raise ValueError(f"set_http_response: expected a status from 200 to 599, got {status}")
    content_type = "text/html; charset=utf-8"  # Flask's own default.
    headers: list[tuple[str, str]] = []
    for name, value in fields:
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"set_http_response: {name!r} is not a valid header name")
        if _NO_HEADER_VALUE.search(value):
            raise ValueError(f"set_http_response: header {name!r} has a control character in its value")
        if name.lower() == "content-type":
            content_type = value
        elif name.lower() not in _OF_THE_CONNECTION:
            headers.append((name, value))
    return HttpResponse(body, status, content_type, tuple(headers))


def flask_response(response: HttpResponse) -> flask.Response:
    """Return the response as a Flask response."""
    from flask import Response  # noqa: PLC0415
    from werkzeug.datastructures import Headers  # noqa: PLC0415

    headers = Headers(response.headers)
    return Response(bytes(response.body), response.status, headers, content_type=response.content_type)
