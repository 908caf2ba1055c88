"""What pages for browsers share: each is one document that loads nothing, and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from triglot.core.http import HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.api_operation import ALLOW
from triglot.protocols.rows import Route

PROTOCOL = "monitor"
"""What telemetry counts calls of pages under."""
ALIVE = HttpResponse(b'{"status": "alive"}')
"""KServe V1's answer to a liveness check at `/`."""

STYLES = Path(__file__).with_name("page.css")
"""Styles of all pages: colours, and elements that are not specific to one page."""
TOKEN_SCRIPT = Path(__file__).with_name("token.js")
"""Script of all pages: asks for a token, if the server requires one, and sends it. Needs the page's `html`."""


@cache
def page_text(file: Path, styles: tuple[Path, ...] = (), scripts: tuple[Path, ...] = ()) -> str:
    """Return the document, with `STYLES`, these styles and these scripts in place of its markers."""
    text = file.read_text(encoding="utf-8")
    for marker, parts in (("/* styles */", [STYLES, *styles]), ("/* scripts */", scripts)):
        text = text.replace(marker, "\n".join([part.read_text(encoding="utf-8") for part in parts]))
    return text


@cache
def page_headers(page: str) -> Mapping[str, str]:
    """Return headers by which only the page's own script runs, as it shows names from users.

    Framing is forbidden.
    """
    policy = (
        "default-src 'none'; base-uri 'none'; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; "
        f"img-src data:; script-src {_hash_of(page, 'script')}; style-src {_hash_of(page, 'style')}"
    )
    return {
        "Cache-Control": "no-store",
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
    }


def _hash_of(page: str, tag: str) -> str:
    """Return the policy's hash of the content of the page's only element of this kind."""
    content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def readable(route: Route) -> list[Route]:
    """Return a path's rows: GET, HEAD, and OPTIONS (grps 3.1)."""
    allowed = HttpResponse(b"", content_type="text/plain; charset=utf-8", headers={"Allow": "GET, HEAD, OPTIONS"})

    async def allow(*_: object) -> None:
        pass

    options = Route(
        "OPTIONS",
        route.path,
        Operation.PUBLIC,
        lambda _: None,
        allow,
        lambda *_: allowed,
        protocol=PROTOCOL,
        documented=(ALLOW,),
    )
    return [route, replace(route, verb="HEAD"), options]


def liveness_route() -> Route:
    """Return KServe V1's liveness check, where no page is at `/`."""

    async def nothing(*_: object) -> None:
        pass

    return Route("GET", "/", Operation.PUBLIC, lambda _: None, nothing, lambda *_: ALIVE, protocol=PROTOCOL)
