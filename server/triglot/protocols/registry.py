"""Builds the rows of all protocols that the configuration enables: gRPC services and REST routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from triglot.config.options import PROTOCOLS, Config
from triglot.core.call import Call
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import ADMINISTRATION
from triglot.core.permission import Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.protocols import api_operation as operation
from triglot.protocols.grpc.health import Health
from triglot.protocols.grpc.reflection import reflection_services
from triglot.protocols.grps import openapi as grps_api
from triglot.protocols.grps.metadata import server_text
from triglot.protocols.grps.routes import HttpRules, grps_routes
from triglot.protocols.grps.service import Grps
from triglot.protocols.json.limits import JsonLimits
from triglot.protocols.kserve import openapi as kserve_api
from triglot.protocols.kserve.extension import Extension
from triglot.protocols.kserve.generate import Generate
from triglot.protocols.kserve.log_settings import LogSetting
from triglot.protocols.kserve.model_config import ModelConfigs
from triglot.protocols.kserve.regions import Regions
from triglot.protocols.kserve.routes import kserve_routes
from triglot.protocols.kserve.service import KServe
from triglot.protocols.kserve.shared_memory import CudaSharedMemory, SystemSharedMemory
from triglot.protocols.kserve.statistics import ModelStatistics
from triglot.protocols.kserve.stream import StreamLimits
from triglot.protocols.kserve.trace_settings import TraceSetting
from triglot.protocols.monitor import openapi as monitor_api
from triglot.protocols.monitor.routes import METRICS, About, monitor_routes, page_route, readable
from triglot.protocols.openapi.routes import openapi_routes
from triglot.protocols.rows import Method, Route, Service
from triglot.protocols.tfserving import openapi as tfserving_api
from triglot.protocols.tfserving.ai_platform import AIPlatform, ai_platform_routes
from triglot.protocols.tfserving.metrics import metrics_route
from triglot.protocols.tfserving.models import Models
from triglot.protocols.tfserving.routes import RestApi, not_found_route, tfserving_routes
from triglot.protocols.tfserving.rows import tfserving_services
from triglot.protocols.tfserving.service import Predictions
from triglot.protocols.tfserving.vertex import Vertex, container_routes, vertex_routes
from triglot.protocols.tfserving.vertex_rows import SERVICE as VERTEX_SERVICE
from triglot.protocols.tfserving.vertex_rows import vertex_service
from triglot.scheduling.admission import UNLIMITED, Limits
from triglot.telemetry.audit_log import AuditLog
from triglot.telemetry.log_settings import LogSettings
from triglot.telemetry.store import Telemetry

SCHEMAS = {
    **operation.SCHEMAS,
    **kserve_api.SCHEMAS,
    **tfserving_api.SCHEMAS,
    **grps_api.SCHEMAS,
    **monitor_api.SCHEMAS,
}
"""The schemas that operations of the OpenAPI document refer to."""
ALIVE = HttpResponse(b'{"status": "alive"}')
DEFAULT_REST_PORT = Config().rest_port
Rows = tuple[list[Service], list[Route]]
Row = TypeVar("Row", Method, Route)


def rows(
    dataplane: DataPlane,
    predictions: Predictions,
    telemetry: Telemetry,
    config: Config,
    about: str = "",
    logs: LogSettings | None = None,
    regions: Regions | None = None,
    grpc_port: Callable[[], int] = int,
    admission: Limits = UNLIMITED,
) -> Rows:
    """Returns the gRPC services and REST routes, including health, reflection, metrics and the OpenAPI document.

    `about` is the text of grps' ServerMetadata; if empty, it is generated. Without `regions` shared memory is
    disabled. `grpc_port` returns the gRPC port once the server has started, 0 if there is none. `admission`: the
    limits on requests, of which one stream may take a part.
    """
    regions = regions or Regions()
    served = config.protocol_names
    limits = JsonLimits(config.max_json_size, config.max_json_values)
    services: list[Service] = []
    routes: list[Route] = []
    health_names: list[str] = []
    if "kserve" in served:
        logs = logs or LogSettings(telemetry.access_log)
        extensions = _extensions(dataplane, limits, logs)
        extensions += [SystemSharedMemory(regions, dataplane.control), CudaSharedMemory()]
        max_upload = config.max_message_size if config.allow_model_upload else 0
        kserve = KServe(
            dataplane,
            config.server_name,
            telemetry,
            extensions,
            regions,
            max_upload=max_upload,
            oip_platforms=config.platform_names == "oip",
            typed_contents=config.typed_contents,
            stream_limits=StreamLimits.within(config.max_queue_size, admission, config.max_unread_bytes),
        )
        services.append(kserve.grpc_service())
        routes += _with_protocol("kserve", kserve_routes(kserve, limits))
    if "tfserving" in served:
        tensorflow, paths = _tfserving(dataplane, predictions, config, telemetry, limits)
        services += tensorflow
        routes += _with_protocol("tfserving", paths)
        # TensorFlow Serving's health service knows its services without their package (tfs 1).
        health_names += [one.name.rpartition(".")[2] for one in tensorflow if one.name != VERTEX_SERVICE]
    if "grps" in served:
        grps, paths = _grps(dataplane, config, about, limits)
        services += grps
        # Before all others: a grps project's path may equal one of theirs, and then takes precedence.
        routes = paths + routes
    routes += _monitor(dataplane, telemetry, config, grpc_port)
    health_names += [service.name for service in services]
    services.append(Health(dataplane, health_names).grpc_service())
    services += reflection_services([service.name for service in services])
    routes = _first_of_each(_with_openapi(routes, dataplane, config))
    return _audited(services, routes, telemetry.audit_log) if config.audit_required else (services, routes)


def _audited(services: list[Service], routes: list[Route], audit_log: AuditLog) -> Rows:
    """Returns the rows with a line in the audit log before each administrative call."""

    def audited(row: Row, protocol: str, entrypoint: str, method: str) -> Row:
        if row.operation not in ADMINISTRATION or row.call is None:
            return row
        act: Callable[[Any, Call], Any] = row.call

        async def begin(request: Any, call: Call) -> Any:
            call.subject = call.subject or str(getattr(request, "model_name", ""))
            await audit_log.begin(protocol, entrypoint, method, call)
            return await act(request, call)

        return replace(row, call=begin)

    return [
        replace(one, methods=tuple([audited(row, one.protocol, "GRPC", row.name) for row in one.methods]))
        for one in services
    ], [audited(row, row.protocol, "REST", row.method) for row in routes]


def _first_of_each(routes: list[Route]) -> list[Route]:
    """Returns the first route of each verb and path: paths of the configuration may equal built-in ones."""
    firsts: dict[tuple[str, str], Route] = {}
    for route in routes:
        firsts.setdefault((route.verb, route.path), route)
    return list(firsts.values())


def _extensions(dataplane: DataPlane, limits: JsonLimits, logs: LogSettings) -> list[Extension]:
    """Returns Triton's extensions of KServe V2."""
    return [
        ModelConfigs(dataplane),
        ModelStatistics(dataplane),
        Generate(dataplane, limits),
        TraceSetting(dataplane),
        LogSetting(logs, dataplane.control),
    ]


def _with_protocol(protocol: str, routes: list[Route]) -> list[Route]:
    return [replace(route, protocol=protocol) for route in routes]


def _tfserving(
    dataplane: DataPlane, predictions: Predictions, config: Config, telemetry: Telemetry, limits: JsonLimits
) -> Rows:
    models = Models(dataplane, config.max_requested_entries)
    services = tfserving_services(predictions, models, tensor_content=config.tensor_content)
    ai_platform = AIPlatform(dataplane, limits, named=config.named_prediction_models)
    vertex = Vertex(dataplane, ai_platform, config.endpoint_models)
    metrics = partial(metrics_route, telemetry, dataplane.control)
    routes = [metrics(config.monitoring_path)] if config.monitoring_path else []
    routes += container_routes(vertex, config.predict_route, config.health_route)
    routes += ai_platform_routes(ai_platform) + vertex_routes(vertex)
    api = RestApi(dataplane, predictions, models, kserve_v1="kserve" in config.protocol_names, limits=limits)
    services.append(vertex_service(vertex, dataplane))
    return services, routes + tfserving_routes(api, cors=config.cors)


def _grps(dataplane: DataPlane, config: Config, about: str, limits: JsonLimits) -> Rows:

    def described(permission: Permission) -> str:
        # The configured text describes all models.
        all_of_it = about if permission.covers_all else ""
        return all_of_it or server_text(config.server_name, dataplane, permission)

    service = Grps(dataplane, default_model=config.default_model, online=config.grps_online, server_text=described)
    rules = HttpRules(
        path=config.grps_path,
        customized_body=config.grps_customized_body,
        streaming_mode=config.grps_streaming_mode,
        streaming_key=config.grps_streaming_key,
        streaming_content_type=config.grps_streaming_content_type,
        always_200=config.grps_http_errors == "always_200",
    )
    return [service.grpc_service()], grps_routes(service, rules, limits)


def _monitor(
    dataplane: DataPlane, telemetry: Telemetry, config: Config, grpc_port: Callable[[], int]
) -> list[Route]:
    """Returns the metrics routes and the page at `/`; TensorFlow Serving alone answers 404 there."""
    served = config.protocol_names
    about = About(
        config.server_name,
        # In customised HTTP a grps project parses its requests itself.
        [name for name in PROTOCOLS if name in served and not (name == "grps" and config.grps_customized_body)],
        grpc_port,
        tls=bool(config.tls_certificate),
        loads="kserve" in served and config.model_control_mode == "explicit",
        grps_streaming=config.grps_streaming_key if config.grps_streaming_mode == "query_param" else "",
        is_open=not config.access,
    )
    routes = monitor_routes(telemetry, dataplane, about)
    if config.protocol_names == {"tfserving"}:
        return [*(route for route in routes if route.path == METRICS), not_found_route()]
    page = page_route(telemetry, dataplane.control, "/", about)
    return [*routes, *readable(_page_or_liveness(page) if config.first_protocol == "kserve" else page)]


def _with_openapi(routes: list[Route], dataplane: DataPlane, config: Config) -> list[Route]:
    """Add the routes of the OpenAPI document; TensorFlow Serving alone has none."""
    if config.protocol_names == {"tfserving"}:
        return routes
    address = _rest_address(config)
    return routes + openapi_routes(routes, dataplane.serving, SCHEMAS, config.server_name, address)


def _rest_address(config: Config) -> str:
    """Returns the REST address for examples, as seen from this machine.

    The default port if any free one is used.
    """
    port = config.rest_port or DEFAULT_REST_PORT
    return f"{'https' if config.tls_certificate else 'http'}://{config.local_address(port)}"


def _page_or_liveness(page: Route) -> Route:
    """Returns a route with the page for browsers, and KServe V1's liveness for all other clients."""

    read = page.call
    assert read is not None

    async def call(http: HttpRequest, call: Call) -> Any:
        return await read(page.decode(http), call) if _is_browser(http) else None

    def encode(answer: Any, http: HttpRequest) -> HttpResponse:
        return page.encode(answer, page.decode(http)) if _is_browser(http) else ALIVE

    return replace(page, decode=lambda http: http, call=call, encode=encode, documented=(monitor_api.ROOT,))


def _is_browser(http: HttpRequest) -> bool:
    return "text/html" in http.headers.get("accept", "")
