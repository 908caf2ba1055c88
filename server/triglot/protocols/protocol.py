"""What a protocol is to the server: a function of a `Context` that returns a `Protocol`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from triglot.config.options import Config
from triglot.dataplane.dataplane import DataPlane
from triglot.protocols.api_operation import Schema
from triglot.protocols.json.dialect import JsonLimits
from triglot.protocols.kserve.regions import Regions
from triglot.protocols.rows import Route, Service
from triglot.scheduling.loaded_version import UNLIMITED, Limits
from triglot.telemetry.log_settings import LogSettings
from triglot.telemetry.store import Telemetry


@dataclass(frozen=True, slots=True)
class Protocol:
    """The rows of one protocol.

    `schemas`: those that its operations of the OpenAPI document refer to. `health_names`: further names of its
    services in gRPC's health service. `precedes`: its routes come before equal ones of other protocols.
    """

    services: Sequence[Service] = ()
    routes: Sequence[Route] = ()
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    health_names: Sequence[str] = ()
    precedes: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What a protocol may use of the server.

    `about` is the text of grps' ServerMetadata; if empty, it is generated. Without `logs` log settings are those
    of a new server. By default shared memory is disabled. `grpc_port` returns the gRPC port once the server has
    started, 0 if there is none. `admission`: the limits on requests, of which one stream may take a part.
    `others`: the protocols that are served beside, for pages that describe them.
    """

    dataplane: DataPlane
    telemetry: Telemetry
    config: Config
    about: str = ""
    logs: LogSettings | None = None
    regions: Regions = field(default_factory=Regions)
    grpc_port: Callable[[], int] = int
    admission: Limits = UNLIMITED
    others: Sequence[Protocol] = ()

    @property
    def json_limits(self) -> JsonLimits:
        """The limits on JSON bodies."""
        return JsonLimits(self.config.max_json_size, self.config.max_json_values)


MakeProtocol = Callable[[Context], Protocol]
"""What the table of parts, and `--protocols MODULE:FUNCTION`, name."""
