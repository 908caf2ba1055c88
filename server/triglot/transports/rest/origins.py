"""Protects browsers' users: pages of other origins must not use the server on their behalf (CSRF, CORS).

Strategy: a browser's request says in Host which server it believes to talk to, and in Sec-Fetch-Site and Origin
which page sends it. Pages cannot change these headers, and other clients do not send the latter two. Whether
the origin is checked depends on the operation of the request's route, and not on its path.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache

from triglot.config.options import Config
from triglot.core.errors import PermissionDenied
from triglot.core.http import HttpResponse
from triglot.core.operation import ADMINISTRATION, Operation
from triglot.protocols.rows import Route

CHECKED = {Operation.INFER, *ADMINISTRATION}
"""Operations that pages of other origins may not use. They cannot read the responses of the others."""
SAFE_VERBS = ("GET", "HEAD")
BROWSER = "Mozilla/"
"""Prefix of every browser's User-Agent."""
PREFLIGHT_SECONDS = "600"
"""Time for which a browser may cache the result of a preflight request."""
MAX_HOSTS, MAX_HOST = 256, 256
"""Limits on the Host headers whose check is cached, and on their length; also on that in errors."""


class Origins:
    """Checks browsers' headers by the options allowed_hosts and allowed_origins."""

    def __init__(self, config: Config) -> None:
        self._origins = frozenset(config.allowed_origin_list)
        self._hosts = {"localhost", config.host.lower(), *config.allowed_host_list}
        # A server that is reachable from other machines has names that it cannot know.
        self._any_host = "*" in self._hosts or not (config.on_loopback or config.allowed_host_list)
        self._is_own = lru_cache(MAX_HOSTS)(self._has_own_name)

    def check(self, route: Route, headers: Mapping[str, str]) -> None:
        """Raises `PermissionDenied` for a request that a page of another origin may have sent."""
        host = headers.get("host", "")
        is_own = self._is_own if len(host) <= MAX_HOST else self._has_own_name
        if host and not self._any_host and not is_own(host):
            host = host.rpartition("@")[2]  # Without user and password, which must not be logged.
            raise PermissionDenied(
                f"Host {host[:MAX_HOST]!r} is not a name of this server; add it with --allowed-hosts"
            )
        if route.operation not in CHECKED:
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if route.operation in ADMINISTRATION and route.verb in SAFE_VERBS:
            # A page can send it with an image; without TLS and not on loopback, only User-Agent reveals the
            # browser.
            if site or origin or headers.get("user-agent", "").startswith(BROWSER):
                raise PermissionDenied(f"browsers must not change the server with {route.verb}; use POST")
            return
        if origin is None and site is None:
            return
        if route.any_origin or (origin is not None and origin.lower() in self._origins):
            return
        if site is None:
            # Schemes are not compared: they differ behind a proxy that terminates TLS.
            same = origin is not None and origin.partition("://")[2].lower() == host.lower()
        else:
            same = site in ("same-origin", "none")
        if not same:
            raise PermissionDenied(
                f"a web page of another origin ({(origin or site or '')[:MAX_HOST]!r}) must not use "
                f"{route.method}; allow its origin with --allowed-origins"
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
        return True  # The browser connected to this very address: a rebound DNS name would be in Host.

    def preflight(self, headers: Mapping[str, str]) -> HttpResponse | None:
        """Returns the response to a preflight request from a page of an allowed origin.

        None for any other request.
        """
        verb = headers.get("access-control-request-method")
        if verb is None or not self._allows(headers):
            return None
        allowed = {"Access-Control-Allow-Methods": verb, "Access-Control-Max-Age": PREFLIGHT_SECONDS}
        if asked := headers.get("access-control-request-headers"):
            allowed["Access-Control-Allow-Headers"] = asked
        return HttpResponse(b"", 204, content_type="", headers=allowed)

    def allow(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the header fields that let a page of an allowed origin read the response."""
        if not self._origins or not self._allows(headers):
            return {}
        return {"Access-Control-Allow-Origin": headers["origin"], "Access-Control-Expose-Headers": "*"}

    def _allows(self, headers: Mapping[str, str]) -> bool:
        return headers.get("origin", "").lower() in self._origins
