"""The metrics and the monitor page, as a protocol of the server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triglot.core.call import Call
from triglot.core.http import HttpRequest, HttpResponse
from triglot.protocols.monitor import openapi
from triglot.protocols.monitor.routes import METRICS, About, monitor_routes, page_route
from triglot.protocols.pages import ALIVE, readable
from triglot.protocols.protocol import Context, Protocol
from triglot.protocols.rows import Route

FORMS = ("kserve", "tfserving", "grps")
"""Protocols in which the page calls models."""


def monitor(context: Context) -> Protocol:
    """Return the metrics' routes and the page at `/`; TensorFlow Serving alone answers 404 there."""
    config, telemetry, dataplane = context.config, context.telemetry, context.dataplane
    served = config.served_protocols
    about = About(
        config.server_name,
        # In customised HTTP a grps project parses its requests itself.
        [name for name in served if name in FORMS and not (name == "grps" and config.grps_customized_body)],
        context.grpc_port,
        tls=bool(config.tls_certificate),
        loads="kserve" in served and config.model_control_mode == "explicit",
        grps_streaming=config.grps_streaming_key if config.grps_streaming_mode == "query_param" else "",
        is_open=not config.access,
    )
    routes = monitor_routes(telemetry, dataplane, about)
    if config.protocol_names == {"tfserving"}:
        return Protocol(routes=[route for route in routes if route.path == METRICS])
    page = page_route(telemetry, dataplane.control, "/", about)
    root = _page_or_liveness(page) if config.first_protocol == "kserve" else page
    return Protocol(routes=[*routes, *readable(root)], schemas=openapi.SCHEMAS)


def _page_or_liveness(page: Route) -> Route:
    """Return a route with the page for browsers, and KServe V1's liveness for all other clients."""

    read = page.call
    assert read is not None

    async def call(http: HttpRequest, call: Call) -> Any:
        return await read(page.decode(http), call) if _is_browser(http) else None

    def encode(answer: Any, http: HttpRequest) -> HttpResponse:
        return page.encode(answer, page.decode(http)) if _is_browser(http) else ALIVE

    return replace(page, decode=lambda http: http, call=call, encode=encode, documented=(openapi.ROOT,))


def _is_browser(http: HttpRequest) -> bool:
    return "text/html" in http.headers.get("accept", "")
