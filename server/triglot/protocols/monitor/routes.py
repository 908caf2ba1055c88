"""The routes of the monitor: Prometheus' text, grps' series and page (grps 3.1, 7), and the page's numbers."""

from __future__ import annotations

import gzip
import html
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from triglot.core.call import Call
from triglot.core.http import HttpRequest, HttpResponse
from triglot.dataplane import DataPlane
from triglot.protocols import Operation, Route, no_work
from triglot.protocols.monitor.overview import overview
from triglot.protocols.monitor.prometheus import PrometheusText
from triglot.protocols.monitor.scripts import script_routes, takes_gzip
from triglot.repository.plan import Version
from triglot.telemetry.store import Telemetry
from triglot.version import __version__

PROTOCOL = "monitor"
METRICS = "/metrics"
SERIES = "/grps/v1/monitor/series"
PAGE = "/grps/v1/monitor/metrics"
OVERVIEW = "/grps/v1/monitor/overview"
PAGE_FILE = Path(__file__).with_name("page.html")
NAMES_MARKER = "<!-- metric names -->"
"""Where the page lists the names of the metrics, for readers without JavaScript too."""
KIND_BYTES = 64
"""What one kind of call adds to the work of the overview, in bytes of text."""
_NO_STORE = {"Cache-Control": "no-store"}


def monitor_routes(telemetry: Telemetry, dataplane: DataPlane, server_name: str) -> list[Route]:
    """`/metrics`, and grps' routes below `/grps/v1/monitor` and `/grps/v1/js`."""
    text = PrometheusText(telemetry)

    async def look(_: HttpRequest, __: Call) -> _State:
        return _State(dataplane.versions(), dataplane.ready)

    def encode_metrics(state: _State, http: HttpRequest) -> HttpResponse:
        body, content_type = text.render(state.versions, http.headers.get("accept", ""))
        headers = {"Vary": "Accept, Accept-Encoding"}
        if takes_gzip(http):
            headers["Content-Encoding"] = "gzip"
            body = gzip.compress(body, 1, mtime=0)
        return HttpResponse(body, content_type=content_type, headers=headers)

    def encode_overview(state: _State, _: HttpRequest) -> HttpResponse:
        server = {
            "name": server_name,
            "version": __version__,
            "uptime_seconds": round(telemetry.uptime, 3),
            "ready": state.ready,
        }
        document = {"server": server, **overview(telemetry, state.versions)}
        return HttpResponse(orjson.dumps(document), headers=_NO_STORE)

    routes = [
        _route(METRICS, look, encode_metrics, lambda _: text.size),
        _route(SERIES, _nothing, partial(_encode_series, telemetry)),
        page_route(telemetry, PAGE),
        _route(OVERVIEW, look, encode_overview, lambda _: telemetry.kinds * KIND_BYTES),
        *script_routes(),
    ]
    return [replace(route, verb=verb) for route in routes for verb in ("GET", "HEAD")]


def page_route(telemetry: Telemetry, path: str) -> Route:
    """The page at `path`."""
    before, _, after = PAGE_FILE.read_text(encoding="utf-8").partition(NAMES_MARKER)

    def encode(_: object, __: HttpRequest) -> HttpResponse:
        names = [html.escape(name) for name in telemetry.metrics.by_name]
        items = "\n".join([f'<li data-name="{name}">{name}</li>' for name in names])
        page = f"{before}{items}{after}".encode(errors="replace")
        return HttpResponse(page, content_type="text/html; charset=utf-8", headers=_NO_STORE)

    return _route(path, _nothing, encode)


@dataclass(frozen=True, slots=True)
class _State:
    """What the event loop alone may read: every version of every model, and whether the server is ready."""

    versions: list[Version]
    ready: bool


def _route(
    path: str,
    call: Callable[[HttpRequest, Call], Awaitable[Any]],
    encode: Callable[[Any, HttpRequest], HttpResponse],
    answer_size: Callable[[Any], int] = no_work,
) -> Route:
    """A GET that reads the telemetry where it is printed: on a thread, if there is much of it."""
    return Route(
        "GET", path, Operation.INSPECT, lambda http: http, call, encode, answer_size=answer_size, protocol=PROTOCOL
    )


async def _nothing(_: HttpRequest, __: Call) -> None:
    return


def _encode_series(telemetry: Telemetry, _: None, http: HttpRequest) -> HttpResponse:
    """The points of one metric (grps 7)."""
    query = parse_qs(http.target.partition("?")[2])
    metric = telemetry.metric(query.get("name", [""])[0])
    if metric is None:
        return HttpResponse(b"key not found", content_type="text/plain; charset=utf-8")
    return HttpResponse(orjson.dumps({"label": metric.label, "data": metric.data()}), headers=_NO_STORE)
