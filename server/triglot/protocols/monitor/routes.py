"""The monitor's routes: Prometheus metrics, grps' series and page (grps 3.1, 7), and the page's data."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from triglot.core.call import Call
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse, no_work
from triglot.core.operation import EVERYTHING, Operation
from triglot.dataplane.control import METRICS as METRICS_REPORT
from triglot.dataplane.control import NAMES, Arguments, Control, Reports
from triglot.dataplane.control import OVERVIEW as OVERVIEW_REPORT
from triglot.dataplane.control import SERIES as SERIES_REPORT
from triglot.dataplane.dataplane import DataPlane
from triglot.protocols.api_operation import ApiOperation
from triglot.protocols.monitor import openapi
from triglot.protocols.monitor.details import encode_details, model_details
from triglot.protocols.monitor.overview import overview, overview_report
from triglot.protocols.pages import PROTOCOL, TOKEN_SCRIPT, page_headers, page_text, readable
from triglot.protocols.rows import Route
from triglot.repository.manager.plan import Version
from triglot.telemetry.process import MachineUsage
from triglot.telemetry.series import merged_series, series_report
from triglot.telemetry.store import Telemetry
from triglot.version import __version__

if TYPE_CHECKING:
    from triglot.protocols.monitor.prometheus import PrometheusText

METRICS = "/metrics"
SERIES = "/grps/v1/monitor/series"
PAGE = "/grps/v1/monitor/metrics"
OVERVIEW = "/grps/v1/monitor/overview"
MODEL = "/grps/v1/monitor/model"
PAGE_FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("charts.js", "overview.js", "tensors.js", "protocols.js", "snippets.js", "model.js", "page.js")
NAMES_MARKER = "<!-- metric names -->"
"""Marker in the page for the list of metric names, which is for readers without JavaScript, too."""
KIND_BYTES, METRICS_KIND_BYTES = 64, 2048
"""Cost of one kind of call in the overview and in the metrics, in bytes of text."""
TEXT = "text/plain; charset=utf-8"
_NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class About:
    """What the page needs to know about the server to make calls.

    `protocols`: those in which it can call models. `grpc_port` returns the port, 0 if there is none. `loads`:
    clients may load and unload models. `grps_streaming`: the query parameter that asks grps for a stream, if it is
    a query parameter. `is_open`: all clients may know the metrics' names.
    """

    name: str
    protocols: Sequence[str] = ()
    grpc_port: Callable[[], int] = int
    tls: bool = False
    loads: bool = False
    grps_streaming: str = ""
    is_open: bool = True

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "name": self.name,
            "version": __version__,
            "protocols": self.protocols,
            "grpc_port": self.grpc_port() or None,
            "tls": self.tls,
            "loads": self.loads,
            "grps_streaming": self.grps_streaming,
        }


class _Metrics:
    """The telemetry in Prometheus' formats, whose library is imported when it is first read."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._machine = MachineUsage()
        self._text: PrometheusText | None = None

    async def text(self) -> PrometheusText:
        """Return what prints the metrics."""
        if self._text is None:
            self._text = await asyncio.to_thread(self._make)
        return self._text

    def _make(self) -> PrometheusText:
        from triglot.protocols.monitor.prometheus import PrometheusText  # noqa: PLC0415

        return PrometheusText(self._telemetry, self._machine)


def monitor_routes(telemetry: Telemetry, dataplane: DataPlane, about: About) -> list[Route]:
    """Return `/metrics`, and grps' routes below `/grps/v1/monitor`.

    All but the route of one model are about all models, and need permission for all.
    """
    metrics, control = _Metrics(telemetry), dataplane.control

    _register_reports(telemetry, dataplane, metrics)

    async def read_metrics(_: HttpRequest, call: Call) -> tuple[list[Version] | Reports, PrometheusText]:
        call.permission.check_all_models()
        text = await metrics.text()
        if control.single_process:
            return dataplane.versions(EVERYTHING), text
        return await control.reports(METRICS_REPORT, {}), text

    def encode_metrics(found: tuple[list[Version] | Reports, PrometheusText], http: HttpRequest) -> HttpResponse:
        state, text = found
        accept = http.headers.get("accept", "")
        if isinstance(state, Reports):
            body, content_type = text.render_reports(state, accept)
        else:
            body, content_type = text.render(state, accept)
        headers = {"Vary": "Accept, Accept-Encoding"}
        if _takes_gzip(http):
            headers["Content-Encoding"] = "gzip"
            body = gzip.compress(body, 1, mtime=0)
        return HttpResponse(body, content_type=content_type, headers=headers)

    async def read_overview(_: HttpRequest, call: Call) -> dict[str, Any]:
        call.permission.check_all_models()
        reports = await control.reports(OVERVIEW_REPORT, {})
        server = {
            **about.document(),
            "uptime_seconds": round(telemetry.uptime, 3),
            "ready": dataplane.ready,
        }
        return {"server": server, **await dataplane.off_loop(partial(overview, reports.each))}

    def encode_overview(document: dict[str, Any], _: HttpRequest) -> HttpResponse:
        return HttpResponse(dumps(document), headers=_NO_STORE)

    routes = [
        _route(
            METRICS,
            openapi.METRICS,
            read_metrics,
            encode_metrics,
            lambda _: telemetry.kinds * METRICS_KIND_BYTES,
        ),
        _series_route(telemetry, control),
        page_route(telemetry, control, PAGE, about),
        _route(
            OVERVIEW,
            openapi.OVERVIEW,
            read_overview,
            encode_overview,
            lambda _: telemetry.kinds * KIND_BYTES,
        ),
        _model_route(dataplane, about),
    ]
    return [row for route in routes for row in readable(route)]


def page_route(telemetry: Telemetry, control: Control, path: str, about: About) -> Route:
    """Return the page at `path`. It is public: only its script requests restricted data."""
    first, *scripts = [PAGE_FOLDER / name for name in SCRIPTS]

    async def read(_: HttpRequest, __: Call) -> list[str]:
        if not about.is_open:
            return []
        if control.single_process:
            return list(telemetry.metrics.by_name)
        reports = await control.reports(NAMES, {})
        return list(dict.fromkeys(name for names in reports.each for name in names))

    def encode(found: list[str], __: HttpRequest) -> HttpResponse:
        import html  # noqa: PLC0415 - with a table of all entities, which few servers need.

        text = page_text(PAGE_FOLDER / "page.html", (PAGE_FOLDER / "page.css",), (first, TOKEN_SCRIPT, *scripts))
        before, _, after = text.partition(NAMES_MARKER)
        names = [html.escape(name) for name in found]
        items = "\n".join([f'<li data-name="{name}">{name}</li>' for name in names])
        page = f"{before}{items}{after}".encode(errors="replace")
        return HttpResponse(page, content_type="text/html; charset=utf-8", headers=page_headers(text))

    return _route(path, openapi.PAGE, read, encode, operation=Operation.PUBLIC)


def _register_reports(telemetry: Telemetry, dataplane: DataPlane, metrics: _Metrics) -> None:
    """Register this process's reports, which other workers request."""
    control = dataplane.control

    async def families(_: Arguments) -> Any:
        text = await metrics.text()
        return await dataplane.off_loop(partial(text.page, dataplane.versions(EVERYTHING)))

    async def document(_: Arguments) -> Any:
        return await dataplane.off_loop(partial(overview_report, telemetry, dataplane.versions(EVERYTHING)))

    async def series(arguments: Arguments) -> Any:
        return series_report(telemetry.metrics, arguments["name"])

    async def names(_: Arguments) -> Any:
        return list(telemetry.metrics.by_name)

    for name, report in (
        (METRICS_REPORT, families),
        (OVERVIEW_REPORT, document),
        (SERIES_REPORT, series),
        (NAMES, names),
    ):
        control.register_report(name, report)


def _route(
    path: str,
    documented: ApiOperation,
    call: Callable[[HttpRequest, Call], Coroutine[Any, Any, Any]],
    encode: Callable[[Any, HttpRequest], HttpResponse],
    answer_size: Callable[[Any], int] = no_work,
    operation: Operation = Operation.METRICS,
) -> Route:
    """Return a GET row; the telemetry is read where it is printed: on a thread, if there is much of it."""
    return Route(
        "GET",
        path,
        operation,
        lambda http: http,
        call,
        encode,
        answer_size=answer_size,
        protocol=PROTOCOL,
        documented=(documented,),
    )


def _series_route(telemetry: Telemetry, control: Control) -> Route:
    """Return the route of one metric's points (grps 7)."""

    async def read(http: HttpRequest, call: Call) -> dict[str, Any] | None:
        call.permission.check_all_models()
        name = _parameter(http, "name")
        if not control.single_process:
            reports = await control.reports(SERIES_REPORT, {"name": name})
            return merged_series(reports.each)
        metric = telemetry.metric(name)
        return None if metric is None else {"label": metric.label, "data": metric.data()}

    def encode(found: dict[str, Any] | None, _: HttpRequest) -> HttpResponse:
        if found is None:
            return HttpResponse(b"key not found", content_type=TEXT)
        return HttpResponse(dumps(found), headers=_NO_STORE)

    return _route(SERIES, openapi.SERIES, read, encode)


def _model_route(dataplane: DataPlane, about: About) -> Route:
    """Return the route of one version, as this process has it.

    Its document includes the server's part, for clients that may use some models only.
    """

    async def read(http: HttpRequest, call: Call) -> dict[str, Any]:
        name, version = _parameter(http, "name"), _parameter(http, "version")
        details = await model_details(dataplane, call.permission, name, version)
        return {**details, "server": about.document()}

    def encode(found: dict[str, Any], _: HttpRequest) -> HttpResponse:
        return HttpResponse(encode_details(found), headers=_NO_STORE)

    return _route(MODEL, openapi.MODEL, read, encode)


def _takes_gzip(http: HttpRequest) -> bool:
    """Return whether the client accepts gzip."""
    for coding in http.headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = coding.partition(";")
        if name.strip() in ("gzip", "x-gzip"):
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _parameter(http: HttpRequest, name: str) -> str:
    """Return a query parameter, "" if it is missing."""
    return parse_qs(http.target.partition("?")[2]).get(name, [""])[0]
