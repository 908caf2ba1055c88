"""The rows of all protocols that the configuration names: gRPC services and REST routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from triglot import parts
from triglot.config.options import Config, ConfigError
from triglot.core.call import Call
from triglot.core.errors import Unimplemented
from triglot.core.http import HttpResponse
from triglot.core.operation import ADMINISTRATION, Operation
from triglot.protocols.grpc.health import Health
from triglot.protocols.grpc.reflection import reflection_services
from triglot.protocols.pages import liveness_route, readable
from triglot.protocols.protocol import Context, MakeProtocol, Protocol
from triglot.protocols.rows import Method, Route, Service
from triglot.telemetry.calls import Observer

PAGE_PATHS = {
    "monitor": ("/metrics",),
    "traffic": ("/v2/models/{model}/traffic",),
    "openapi": ("/openapi.json", "/docs"),
}
"""The paths at which clients ask for a page that may be missing."""
Rows = tuple[list[Service], list[Route]]
Row = TypeVar("Row", Method, Route)


def protocol_parts(config: Config) -> list[MakeProtocol]:
    """Return what makes each protocol that the configuration names. Raise `ConfigError` for a missing one."""
    try:
        return [
            parts.load_string(name, f"the protocol {name}") if ":" in name else parts.load("protocol", name)
            for name in config.served_protocols
        ]
    except parts.MissingPart as error:
        raise ConfigError(f"protocols: {error}") from error


def rows(context: Context) -> Rows:
    """Return the gRPC services and REST routes, including health, reflection, metrics and the OpenAPI document.

    Raise `ConfigError` for a protocol that is not there.
    """
    config = context.config
    protocols = [make(context) for make in protocol_parts(config)]
    protocols.sort(key=lambda protocol: not protocol.precedes)
    for name in parts.PAGES:
        protocols.append(_page(name, replace(context, others=list(protocols))))
    if config.first_protocol == "kserve":
        protocols.append(Protocol(routes=[liveness_route()]))
    services = [service for protocol in protocols for service in protocol.services]
    routes = _first_of_each([route for protocol in protocols for route in protocol.routes])
    names = [service.name for service in services]
    health_names = [*names, *(name for protocol in protocols for name in protocol.health_names)]
    services.append(Health(context.dataplane, health_names).grpc_service())
    services += reflection_services([service.name for service in services])
    observers = context.telemetry.observers
    return _audited(services, routes, observers) if config.audit_required else (services, routes)


def _page(name: str, context: Context) -> Protocol:
    """Return a page's protocol; if it is missing, rows that say so where clients ask for it."""
    try:
        make: MakeProtocol = parts.load("protocol", name)
    except parts.MissingPart as error:
        text = str(error)

        async def refuse(*_: object) -> None:
            raise Unimplemented(text)

        return Protocol(
            routes=[
                row
                for path in PAGE_PATHS[name]
                for row in readable(
                    Route("GET", path, Operation.PUBLIC, lambda _: None, refuse, lambda *_: HttpResponse(b""))
                )
            ]
        )
    return make(context)


def _audited(services: list[Service], routes: list[Route], observers: Sequence[Observer]) -> Rows:
    """Return the rows with a line in the audit log before each administrative call."""

    def audited(row: Row, protocol: str, entrypoint: str, method: str) -> Row:
        if row.operation not in ADMINISTRATION or row.call is None:
            return row
        act: Callable[[Any, Call], Any] = row.call

        async def begin(request: Any, call: Call) -> Any:
            call.subject = call.subject or str(getattr(request, "model_name", ""))
            for observer in observers:
                if (written := observer.precede(call, protocol, entrypoint, method)) is not None:
                    await written
            return await act(request, call)

        return replace(row, call=begin)

    return [
        replace(
            service, methods=tuple([audited(row, service.protocol, "GRPC", row.name) for row in service.methods])
        )
        for service in services
    ], [audited(row, row.protocol, "REST", row.method) for row in routes]


def _first_of_each(routes: list[Route]) -> list[Route]:
    """Return the first route of each verb and path: paths of the configuration may equal built-in ones."""
    firsts: dict[tuple[str, str], Route] = {}
    for route in routes:
        firsts.setdefault((route.verb, route.path), route)
    return list(firsts.values())
