"""`Server`: builds everything, starts it, and stops it in the right order."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from triglot import backends
from triglot.config import Config
from triglot.core.errors import ModelLoadError
from triglot.dataplane import DataPlane, ModelMetadata
from triglot.protocols.grpc.health import Health
from triglot.protocols.grpc.reflection import reflection_services
from triglot.protocols.kserve.routes import kserve_routes
from triglot.protocols.kserve.service import KServe
from triglot.repository.manager import Load, Manager
from triglot.transports.grpc_server import GrpcServer
from triglot.transports.http_server import HttpServer

log = logging.getLogger(__name__)


class Server:
    """The server of the models at `paths`; `async with` starts and stops it.

    Starting raises `ModelLoadError` when the paths hold no model, or a model cannot be loaded and the
    configuration says that this is the end, and `OSError` when a port is taken. The ports are bound last, when
    every model is loaded.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        config: Config | None = None,
        *,
        load: Load = backends.load,
        skip_missing_dependencies: bool = False,
    ) -> None:
        if isinstance(paths, str | Path):
            raise TypeError(f"paths: expected a list of paths, got {paths!r}")
        self.config = config or Config()
        self.manager = Manager(
            [Path(path) for path in paths],
            load,
            max_queue_size=self.config.max_queue_size,
            skip_missing_dependencies=skip_missing_dependencies,
        )
        self.dataplane = DataPlane(self.manager)
        self.grpc_port = 0
        self.rest_port = 0
        self._grpc: GrpcServer | None = None
        self._http: HttpServer | None = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load every model, then open the ports; see the class for what it raises."""
        for port in (self.config.grpc_port, self.config.rest_port):
            _check_free(self.config.host, port)
        started = time.monotonic()
        try:
            errors = await self.manager.load_all()
            for error in errors:
                log.error("%s", error)
                log.debug("where it came from:", exc_info=error)
            if errors and self.config.exit_on_load_error:
                raise ModelLoadError(f"{len(errors)} of the models could not be loaded: {errors[0]}")
            failed = f", {len(errors)} could not be loaded" if errors else ""
            log.info("all models loaded in %.2f s%s", time.monotonic() - started, failed)
            await self._open()
        except BaseException:
            await self.stop()
            raise

    async def _open(self) -> None:
        started = time.monotonic()
        kserve = KServe(self.dataplane, self.config.server_name)
        services = [kserve.grpc_service()]
        services.append(Health(self.dataplane, [service.name for service in services]).grpc_service())
        services += reflection_services([service.name for service in services])
        self._grpc = GrpcServer(services, self.config)
        self._http = HttpServer(kserve_routes(kserve), self.config)
        self.grpc_port = await self._grpc.start()
        self.rest_port = await self._http.start()
        log.info(
            "gRPC on %s and REST on %s in %.2f s",
            self.config.address(self.grpc_port),
            self.config.address(self.rest_port),
            time.monotonic() - started,
        )
        if not _is_loopback(self.config.host):
            log.warning("whoever reaches %s can call the models: there is no authentication", self.config.host)

    async def drain(self, delay: float) -> None:
        """Turn readiness off and go on serving for `delay` seconds, so that balancers look elsewhere."""
        self.dataplane.stop()
        if self._http is not None:
            self._http.drain()
        if delay:
            log.info("not ready any more; new requests are taken for another %.0f s", delay)
            await asyncio.sleep(delay)

    async def stop(self) -> None:
        """Close the ports, let running calls finish within the grace period, unload the models."""
        self.dataplane.stop()
        stops = [server.stop() for server in (self._grpc, self._http) if server is not None]
        self._grpc = self._http = None
        await asyncio.gather(*stops)
        await self.manager.close()

    def metadata(self) -> list[ModelMetadata]:
        """What the models that serve say of themselves."""
        return [
            self.dataplane.metadata(name)
            for name in self.dataplane.model_names()
            if self.dataplane.model_ready(name)
        ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_free(host: str, port: int) -> None:
    """Raises `OSError` now, rather than after minutes of loading."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose others with --host, --grpc-port and "
            "--rest-port (0: any free port)"
        ) from None
