"""Finds the row of a request.

Strategy: rows without variables are found by their path; the others by the constant beginning of their paths, the
longest first. Results are cached by the path as it was sent, because clients use few different ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from triglot.core.http import HttpResponse
from triglot.protocols.rows import Route
from triglot.telemetry.calls import Endpoint
from triglot.transports.rest.answers import error_body

MAX_CACHED, MAX_CACHED_LENGTH = 1024, 160
"""Limits on the cached requests, and on the characters of their method and path."""
ANY_VERB = "*"
_VARIABLE = re.compile(r"\{([_a-zA-Z][_a-zA-Z0-9]*)(?::(.+))?\}", re.DOTALL)
_VARIABLES = re.compile(r"(\{[_a-zA-Z][^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_ANY_SEGMENT = "[^{}/]+"
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*")
_AFTER_PATH = re.compile(r"[?#]")
_ESCAPES = re.compile(r"(?:%[0-9a-fA-F]{2})+")
_KEPT_ESCAPED = {"/": "%2F", "%": "%25"}
"""Escapes that stay: a variable may contain these characters, and they separate nothing."""


@dataclass(frozen=True, slots=True)
class Found:
    """A row, its metrics, and the decoded variables of the path."""

    route: Route
    endpoint: Endpoint
    variables: Mapping[str, str]


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
        """Returns the row for a method and a target. Raises `Refused` for an unknown path, or another method."""
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
    """Returns the path with escapes decoded, except for slashes, per cent signs, and invalid UTF-8."""
    return _ESCAPES.sub(_decoded, path) if "%" in path else path


def _decoded(escapes: re.Match[str]) -> str:
    raw = bytes.fromhex(escapes[0].replace("%", ""))
    parts: list[str] = []
    at = 0
    for character in raw.decode("utf-8", "surrogateescape"):
        size = 1 if "\udc80" <= character <= "\udcff" else len(character.encode())
        if "\udc80" <= character <= "\udcff":
            parts.append(escapes[0][3 * at : 3 * (at + size)])
        else:
            parts.append(_KEPT_ESCAPED.get(character, character))
        at += size
    return "".join(parts)


def _completely(value: str) -> str:
    return value.replace("%2F", "/").replace("%25", "%") if "%" in value else value
