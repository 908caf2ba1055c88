"""What browsers may do: a web page of another origin must not use the server in its reader's name.

Strategy: a browser says by Host which server it believes to talk to, and by Sec-Fetch-Site and Origin which page
makes it send a request. No page can change these headers, and other clients do not send the latter two. Whether a
request needs its page's origin checked depends on the operation of its route, and not on its path.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache

from aiohttp import hdrs, web

from triglot.config import Config
from triglot.core.errors import PermissionDenied
from triglot.protocols import Operation, Route

FIXED_HEADERS = {hdrs.SERVER: "triglot", "X-Content-Type-Options": "nosniff"}
"""Of every answer. aiohttp's own Server header would name the versions of Python and aiohttp."""
CHECKED = (Operation.INFER, Operation.ADMINISTER)
"""What a page of another origin may not do. What the others answer, no such page can read."""
SAFE_VERBS = ("GET", "HEAD")
BROWSER = "Mozilla/"
"""How the User-Agent of every browser begins."""
PREFLIGHT_SECONDS = "600"
"""How long a browser may remember that it may send such requests."""
MOST_HOSTS = 256
"""Host headers that are remembered."""


class Origins:
    """Checks the headers of browsers, as the options allowed_hosts and allowed_origins say."""

    def __init__(self, config: Config) -> None:
        self._origins = frozenset(config.allowed_origin_list)
        self._hosts = {"localhost", config.host.lower(), *config.allowed_host_list}
        # A server that others may reach has names that it does not know.
        self._any_host = "*" in self._hosts or not (config.on_loopback or config.allowed_host_list)
        self._is_own = lru_cache(MOST_HOSTS)(self._has_own_name)

    def check(self, route: Route, headers: Mapping[str, str]) -> None:
        """Raises `PermissionDenied` for a request that a page of another origin may have sent."""
        host = headers.get("host", "")
        if host and not self._any_host and not self._is_own(host):
            raise PermissionDenied(
                f"Host {host[:MOST_HOSTS]!r} is not a name of this server; --allowed-hosts lists more names"
            )
        if route.operation not in CHECKED:
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if route.operation is Operation.ADMINISTER and route.verb in SAFE_VERBS:
            # An image may be enough to send it; without TLS, and away from loopback, only its User-Agent tells.
            if site or origin or headers.get("user-agent", "").startswith(BROWSER):
                raise PermissionDenied(f"a browser must not change the server by {route.verb}; send it as POST")
            return
        if origin is None and site is None:
            return
        if route.any_origin or (origin is not None and origin.lower() in self._origins):
            return
        if site is None:
            # The scheme may be another behind a proxy that ends TLS.
            same = origin is not None and origin.partition("://")[2].lower() == host.lower()
        else:
            same = site in ("same-origin", "none")
        if not same:
            raise PermissionDenied(
                f"a web page of another origin ({(origin or site or '')[:MOST_HOSTS]!r}) must not use "
                f"{route.method}; --allowed-origins lists the origins whose pages may"
            )

    def _has_own_name(self, host: str) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # The browser has connected to this very address, whatever names lead there.

    def preflight(self, http: web.BaseRequest) -> web.Response | None:
        """The answer to OPTIONS where a browser asks whether a page of an allowed origin may send a request."""
        if not self._allows(http):
            return None
        if (verb := http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)) is None:
            return None
        headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: verb, hdrs.ACCESS_CONTROL_MAX_AGE: PREFLIGHT_SECONDS}
        if asked := http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        return web.Response(status=204, headers=headers)

    def complete(self, http: web.BaseRequest, answer: web.StreamResponse) -> None:
        """Add the headers that every answer has, and those that let a page of an allowed origin read it."""
        answer.headers.update(FIXED_HEADERS)
        if self._origins and self._allows(http):
            answer.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = http.headers[hdrs.ORIGIN]
            answer.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "*"
            answer.headers.add(hdrs.VARY, hdrs.ORIGIN)

    def _allows(self, http: web.BaseRequest) -> bool:
        return http.headers.get(hdrs.ORIGIN, "").lower() in self._origins
