"""grpc.health.v1 for the server (""), each service and each model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from functools import partial

from triglot.core.call import Call
from triglot.core.errors import ModelNotFound, NotFound
from triglot.core.operation import Operation, Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.grpc.health.v1 import health_pb2 as pb
from triglot.protocols.rows import Kind, Method, Service
from triglot.protocols.wire import parse, serialize

SERVICE = "grpc.health.v1.Health"
POLL_SECONDS = 0.5
"""Interval in which watchers check for changes that are not signalled, such as an instance's death."""


class Health:
    """The health service. It always reads the current state of the server and the models."""

    def __init__(self, dataplane: DataPlane, services: Collection[str]) -> None:
        self._dataplane = dataplane
        self._services = frozenset(services)

    async def _status(self, permission: Permission, name: str) -> pb.HealthCheckResponse:
        """Return the status.

        Raise `ModelNotFound`, and `PermissionDenied` for a model that the client may not use.
        """
        everything = not name or name in self._services
        ok = self._dataplane.ready if everything else await self._dataplane.check_ready(permission, name)
        return pb.HealthCheckResponse(
            status=pb.HealthCheckResponse.SERVING if ok else pb.HealthCheckResponse.NOT_SERVING
        )

    async def check(self, request: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        """Return the status of a name. Raise `NotFound`."""
        try:
            return await self._status(call.permission, request.service)
        except ModelNotFound:
            raise NotFound(f"'{request.service}' is neither a service nor a model of this server") from None

    async def list(self, _: pb.HealthListRequest, call: Call) -> pb.HealthListResponse:
        """Return the status of every name that the client may check."""
        names = ["", *self._services, *self._dataplane.known_names(call.permission)]
        statuses = await asyncio.gather(*map(partial(self._status, call.permission), names))
        return pb.HealthListResponse(statuses=dict(zip(names, statuses, strict=True)))

    async def watch(self, request: pb.HealthCheckRequest, call: Call) -> AsyncIterator[pb.HealthCheckResponse]:
        """Yield the status, now and at every change; SERVICE_UNKNOWN for a name that may still be added."""
        last = None
        while True:
            try:
                status = await self._status(call.permission, request.service)
            except ModelNotFound:
                status = pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                yield status
                last = status
            await self._dataplane.readiness_changed(POLL_SECONDS)

    def grpc_service(self) -> Service:
        """Return the rows."""
        decode = partial(parse, pb.HealthCheckRequest)
        decode_list = partial(parse, pb.HealthListRequest)
        return Service(
            SERVICE,
            (
                Method("Check", Kind.UNARY, Operation.HEALTH, decode, self.check, serialize),
                Method("List", Kind.UNARY, Operation.HEALTH, decode_list, self.list, serialize),
                Method("Watch", Kind.SERVER_STREAM, Operation.HEALTH, decode, None, serialize, iterate=self.watch),
            ),
        )
