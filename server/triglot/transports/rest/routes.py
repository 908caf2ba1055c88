"""Finds the row of a request, and checks whether a web page of another origin may use it.

Strategy: rows without variables are found by their path; the others by the constant beginning of their paths, the
longest first. Results are cached by the path as it was sent, because clients use few different ones.

Pages of other origins must not use the server on behalf of browsers' users (CSRF, CORS). A browser's request says
in Host which server it believes to talk to, and in Sec-Fetch-Site and Origin which page sends it. Pages cannot
change these headers, and other clients do not send the latter two. Whether the origin is checked depends on the
operation of the request's route, and not on its path.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from triglot.config.options import Config
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import PermissionDenied
from triglot.core.http import HttpResponse
from triglot.core.operation import ADMINISTRATION, Operation
from triglot.protocols.rows import Route
from triglot.telemetry.calls import Endpoint
from triglot.transports.rest.exchange import error_body

MAX_CACHED: Final = 1024
MAX_CACHED_LENGTH: Final = 160
"""Limits on the cached requests, and on the characters of their method and path."""
ANY_VERB: Final = "*"
_VARIABLE: Final = re.compile(r"\{([_a-zA-Z][_a-zA-Z0-9]*)(?::(.+))?\}", re.DOTALL)
_VARIABLES: Final = re.compile(r"(\{[_a-zA-Z][^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_ANY_SEGMENT: Final = "[^{}/]+"
_ORIGIN: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*")
_AFTER_PATH: Final = re.compile(r"[?#]")
_ESCAPES: Final = re.compile(r"(?:%[0-9a-fA-F]{2})+")
_KEPT_ESCAPED: Final = {"/": "%2F", "%": "%25"}
"""Escapes that stay: a variable may contain these characters, and they separate nothing."""


@dataclass(frozen=True, slots=True)
class Found:
    """A row, its metrics, and the decoded variables of the path."""

    route: Route
    endpoint: Endpoint
    variables: Mapping[str, str]


@mypyc_attr(native_class=False)
class Refused(Exception):
    """No row matches; `answer` is the response."""

    def __init__(self, status: HTTPStatus, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status.phrase)
        self.answer = HttpResponse(error_body(status.phrase), status, headers=headers or {})


Row = tuple[Route, Endpoint]


class Router:
    """Finds rows by HTTP method and path."""

    def __init__(self) -> None:
        self._fixed: dict[str, list[Row]] = {}
        self._patterns: dict[str, list[tuple[re.Pattern[str], Row]]] = {}
        """Patterns by the constant beginning of the path, up to its last slash."""
        self._cached: dict[tuple[str, str], Found] = {}

    def add(self, route: Route, endpoint: Endpoint) -> None:
        """Add a row; of rows that match a request equally well, the first one is used."""
        constant, variable, _ = route.path.partition("{")
        if not variable:
            self._fixed.setdefault(decoded(route.path), []).append((route, endpoint))
            return
        begin = decoded(constant).rpartition("/")[0] or "/"
        self._patterns.setdefault(begin, []).append((_pattern(route.path), (route, endpoint)))

    def find(self, verb: str, target: str) -> Found:
        """Return the row for a method and a target. Raise `Refused` for an unknown path, or another method."""
        sent = _AFTER_PATH.split(target, maxsplit=1)[0] if "?" in target or "#" in target else target
        found = self._cached.get((verb, sent))
        if found is None:
            found = self._find(verb, decoded(_ORIGIN.sub("", sent, count=1) or "/"))
            if len(verb) + len(sent) <= MAX_CACHED_LENGTH:
                if len(self._cached) >= MAX_CACHED:
                    self._cached.clear()
                self._cached[verb, sent] = found
        return found

    def _find(self, verb: str, path: str) -> Found:
        allowed = set[str]()
        for (route, endpoint), variables in self._matches(path):
            if route.verb in (verb, ANY_VERB):
                return Found(route, endpoint, variables)
            allowed.add(route.verb)
        if allowed:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ",".join(sorted(allowed))})
        raise Refused(HTTPStatus.NOT_FOUND)

    def _matches(self, path: str) -> Iterable[tuple[Row, Mapping[str, str]]]:
        for row in self._fixed.get(path, ()):
            yield row, {}
        begin = path
        while begin:
            for pattern, row in self._patterns.get(begin, ()):
                if (match := pattern.fullmatch(path)) is not None:
                    yield row, {name: _completely(value) for name, value in match.groupdict().items()}
            begin = "" if begin == "/" else begin.rpartition("/")[0] or "/"


def _pattern(path: str) -> re.Pattern[str]:
    pattern = ""
    for part in _VARIABLES.split(path):
        variable = _VARIABLE.fullmatch(part)
        if variable is None:
            pattern += re.escape(decoded(part))
        else:
            pattern += f"(?P<{variable[1]}>{variable[2] or _ANY_SEGMENT})"
    return re.compile(pattern)


def decoded(path: str) -> str:
    """Return the path with escapes decoded, except for slashes, per cent signs, and invalid UTF-8."""
    return _ESCAPES.sub(_decoded, path) if "%" in path else path


def _decoded(escapes: re.Match[str]) -> str:
    raw = bytes.fromhex(escapes[0].replace("%", ""))
    parts: list[str] = []
    at = 0
    for character in raw.decode("utf-8", "surrogateescape"):
        is_raw = 0xDC80 <= ord(character) <= 0xDCFF  # A byte that is not UTF-8.
        size = 1 if is_raw else len(character.encode())
        if is_raw:
            parts.append(escapes[0][3 * at : 3 * (at + size)])
        else:
            parts.append(_KEPT_ESCAPED.get(character, character))
        at += size
    return "".join(parts)


def _completely(value: str) -> str:
    return value.replace("%2F", "/").replace("%25", "%") if "%" in value else value


# --- pages of other origins ---

CHECKED: Final = {Operation.INFER, *ADMINISTRATION}
"""Operations that pages of other origins may not use. They cannot read the responses of the others."""
SAFE_VERBS: Final = ("GET", "HEAD")
BROWSER: Final = "Mozilla/"
"""Prefix of every browser's User-Agent."""
PREFLIGHT_SECONDS: Final = "600"
"""Time for which a browser may cache the result of a preflight request."""
MAX_HOSTS: Final = 256
MAX_HOST: Final = 256
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
        """Raise `PermissionDenied` for a request that a page of another origin may have sent."""
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
        """Return the response to a preflight request from a page of an allowed origin.

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
        """Return the header fields that let a page of an allowed origin read the response."""
        if not self._origins or not self._allows(headers):
            return {}
        return {"Access-Control-Allow-Origin": headers["origin"], "Access-Control-Expose-Headers": "*"}

    def _allows(self, headers: Mapping[str, str]) -> bool:
        return headers.get("origin", "").lower() in self._origins
