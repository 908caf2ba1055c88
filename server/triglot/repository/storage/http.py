"""Reads files in parts over HTTPS."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from triglot.repository.storage.store import PIECE, ObjectChanged, StoredObject, StoreError, StoreUnreachable

TIMEOUT_SECONDS = 60
TRIES = 4
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""OpenSSL's variables for additional certificate authorities."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class _Redirects(HTTPRedirectHandler):
    """Rejects redirects from TLS to plain text."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if req.type == "https" and not newurl.startswith("https:"):
            fp.close()
            raise StoreError(f"{code} {msg}: the server redirects to an address without TLS")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@cache
def _opener(*_: str | None) -> OpenerDirector:
    """Return an opener, cached per setting of `CERTIFICATES`, which are read once."""
    return build_opener(_Redirects)


def open_url(url: str, headers: Mapping[str, str], token: str = "") -> HTTPResponse:
    """Return a response with status 200 or 206; `token` is not sent to redirect targets.

    Retries temporary failures. Raise `FileNotFoundError` for 404, `StoreError` for others.
    """
    request = Request(url, headers={"User-Agent": "triglot", **headers})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    opener = _opener(*map(os.environ.get, CERTIFICATES))
    for tries_left in reversed(range(TRIES)):
        try:
            answer: HTTPResponse = opener.open(request, timeout=TIMEOUT_SECONDS)
        except HTTPError as error:
            error.close()
            if error.code == 404:
                raise FileNotFoundError from None
            if tries_left and (error.code >= 500 or error.code == 429):
                time.sleep(2.0**-tries_left)
                continue
            kind = StoreUnreachable if error.code >= 500 or error.code == 429 else StoreError
            raise kind(f"{error.code} {error.reason}") from None
        except (URLError, OSError, HTTPException) as error:
            if tries_left:
                time.sleep(2.0**-tries_left)
                continue
            raise StoreUnreachable(_error_text(error)) from None
        return answer
    raise AssertionError("the last try returns or raises")


def _error_text(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    return str(reason) or type(reason).__name__


def stat_url(url: str) -> StoredObject | None:
    """Return the file at a URL, or None if it does not exist. Raise `StoreError`."""
    try:
        # Not HEAD: signed URLs are valid for GET only.
        answer = open_url(url, {"Range": "bytes=0-0", "Accept-Encoding": "identity"})
    except FileNotFoundError:
        return None
    with answer:
        headers = answer.headers
        match = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if match is None and "Content-Length" not in headers:
            raise StoreError("the server does not say how large the file is")
        size = int(headers["Content-Length"] if match is None else match[3])
        changed = headers.get("Last-Modified", "")
        tag = headers.get("ETag") or changed
    try:
        modified = int(parsedate_to_datetime(changed).timestamp()) if changed else 0
    except ValueError:
        modified = 0
    return StoredObject("", size, tag, modified, in_parts=match is not None)


def read_part(url: str, stored: StoredObject, begin: int, end: int, token: str = "") -> Iterator[bytes]:
    """Yield bytes of a file; retries from where a connection broke.

    Raise `StoreError`; `ObjectChanged` if the response has another size or, for a file with its own tag, another
    tag.
    """
    name = stored.path or "the file"
    for tries_left in reversed(range(TRIES)):
        headers = {"Range": f"bytes={begin}-{end - 1}"} if stored.in_parts else {}
        try:
            answer = open_url(url, {"Accept-Encoding": "identity", **headers}, token)
        except FileNotFoundError:
            raise ObjectChanged(name) from None
        with answer:
            _check_same(answer, stored, name, begin)
            try:
                while piece := answer.read(PIECE):
                    yield piece
                    begin += len(piece)
            except (OSError, HTTPException) as error:
                if not tries_left or not stored.in_parts:
                    raise StoreError(f"{name}: {_error_text(error)}") from None
            if begin >= end or not stored.in_parts:
                return


def _check_same(answer: HTTPResponse, stored: StoredObject, name: str, begin: int) -> None:
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if stored.in_parts and (match is None or int(match[1]) != begin or int(match[3]) != stored.size):
        raise ObjectChanged(name)
    tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
    if not stored.path and tag != stored.tag:
        raise ObjectChanged(name)
