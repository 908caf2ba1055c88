"""Calls that register shared memory, by gRPC and by REST (spec 1.3, 3.1, 3.10).

As in Triton, all clients share one namespace: a client that knows, or lists, the name of a region can use, replace
or unregister it. Regions belong to no model, so clients that may use only some models may do this, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, NotFound, Unimplemented
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.dataplane.control import REGISTER, UNREGISTER, Arguments, Control
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.api_operation import ApiOperation
from triglot.protocols.json.dialect import type_name
from triglot.protocols.json.text import read_body
from triglot.protocols.kserve import openapi as api
from triglot.protocols.kserve.regions import MAX_NAME, Region, Regions
from triglot.protocols.rows import Kind, Method, Route
from triglot.protocols.wire import parse_control, serialize

DISABLED = "system shared memory is disabled; enable it with the server's option shared_memory_prefix"


@dataclass(frozen=True, slots=True)
class Registration:
    """A client's request to register a region."""

    name: str
    key: str
    offset: int
    byte_size: int


class SystemSharedMemory:
    """Registers regions, if the server's configuration enables shared memory."""

    def __init__(self, regions: Regions, control: Control) -> None:
        self._regions = regions
        self._control = control
        control.register_action(REGISTER, self._register)
        control.register_action(UNREGISTER, self._unregister)
        self.names: Sequence[str] = ("system_shared_memory",) if regions.prefix else ()

    async def status(self, name: str, _: Call) -> list[Region]:
        """Return the region of this name, or all regions. Raise `NotFound`."""
        return self._regions.registered(name)

    async def register(self, region: Registration, _: Call) -> None:
        """Register a region. Raise `Unimplemented` if shared memory is disabled, and as `Regions.register`."""
        self._require_enabled()
        await self._control.act(REGISTER, asdict(region))

    async def _register(self, region: Arguments) -> None:
        self._regions.register(region["name"], region["key"], region["offset"], region["byte_size"])

    async def unregister(self, name: str, _: Call) -> None:
        """Unregister the region of this name, or all regions; an unknown name is no error."""
        self._require_enabled()
        if len(name) <= MAX_NAME:  # No region has a longer name, and workers remember it.
            await self._control.act(UNREGISTER, {"name": name})

    async def _unregister(self, arguments: Arguments) -> None:
        self._regions.unregister(arguments["name"])

    def _require_enabled(self) -> None:
        if not self._regions.prefix:
            raise Unimplemented(DISABLED)

    def methods(self) -> Sequence[Method]:
        return [
            _method("SystemSharedMemoryStatus", _name, self.status, _encode_status),
            _method("SystemSharedMemoryRegister", _registration, self.register, _nothing),
            _method("SystemSharedMemoryUnregister", _name, self.unregister, _nothing),
        ]

    def routes(self) -> Sequence[Route]:
        return _routes(
            "systemsharedmemory",
            self.status,
            _print_status,
            _read_registration,
            self.register,
            self.unregister,
            api.REGISTER,
        )


class CudaSharedMemory:
    """CUDA shared memory of a server without GPU support: nothing can be registered, so status lists nothing."""

    names: Sequence[str] = ()

    async def status(self, name: str, _: Call) -> list[Region]:
        """Return no regions. Raise `NotFound` for a name."""
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return []

    async def register(self, name: str, _: Call) -> None:
        """Raise `InvalidArgument`: GPUs are not supported."""
        raise InvalidArgument(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    async def unregister(self, name: str, _: Call) -> None:
        """Do nothing: no region can be registered."""

    def methods(self) -> Sequence[Method]:
        return [
            _method("CudaSharedMemoryStatus", _name, self.status, _nothing),
            _method("CudaSharedMemoryRegister", _name, self.register, _nothing),
            _method("CudaSharedMemoryUnregister", _name, self.unregister, _nothing),
        ]

    def routes(self) -> Sequence[Route]:
        return _routes(
            "cudasharedmemory",
            self.status,
            _print_status,
            _region_in,
            self.register,
            self.unregister,
            api.REGISTER_CUDA,
        )


# --- gRPC ---


def _method(
    name: str, take: Callable[[Any], Any], call: Callable[..., Any], encode: Callable[[Any], bytes]
) -> Method:
    request_class = getattr(pb, f"{name}Request")
    operation = Operation.SHARED_MEMORY_STATUS if name.endswith("Status") else Operation.SHARED_MEMORY
    return Method(name, Kind.UNARY, operation, lambda data: take(parse_control(request_class, data)), call, encode)


def _name(request: Any) -> str:
    return str(request.name)


def _registration(request: pb.SystemSharedMemoryRegisterRequest) -> Registration:
    return Registration(request.name, request.key, request.offset, request.byte_size)


def _encode_status(regions: Sequence[Region]) -> bytes:
    response = pb.SystemSharedMemoryStatusResponse()
    for region in regions:
        status = response.regions[region.name]
        status.name, status.key = region.name, region.key
        status.offset, status.byte_size = region.offset, region.size
    return serialize(response)


def _nothing(_: object) -> bytes:
    return b""


# --- REST ---


def _routes(
    kind: str,
    status: Callable[..., Any],
    encode: Callable[[Any, Any], HttpResponse],
    read: Callable[[HttpRequest], Any],
    register: Callable[..., Any],
    unregister: Callable[..., Any],
    documented: ApiOperation,
) -> list[Route]:
    everything, region_path = f"/v2/{kind}", f"/v2/{kind}/region/{{region}}"
    look, control = Operation.SHARED_MEMORY_STATUS, Operation.SHARED_MEMORY
    rows = [Route("POST", f"{region_path}/register", control, read, register, _empty, documented=(documented,))]
    for path in (everything, region_path):
        rows.append(Route("GET", f"{path}/status", look, _region_in, status, encode, documented=(api.REGIONS,)))
        rows.append(
            Route(
                "POST",
                f"{path}/unregister",
                control,
                _region_in,
                unregister,
                _empty,
                documented=(api.UNREGISTER,),
            )
        )
    return rows


def _region_in(http: HttpRequest) -> str:
    return http.path.get("region", "")


def _read_registration(http: HttpRequest) -> Registration:
    """Raise `InvalidArgument`."""
    return read_body(bytes(http.body), None, partial(_registration_of, http.path["region"]))


def _registration_of(name: str, body: dict[str, Any]) -> Registration:
    key = body.get("key")
    if not isinstance(key, str):
        raise InvalidArgument(f"'key' must be a string, got {_got(body, 'key')}")
    return Registration(name, key, _unsigned(body, "offset", 0), _unsigned(body, "byte_size", None))


def _unsigned(body: dict[str, Any], key: str, default: int | None) -> int:
    value = default if body.get(key) is None else body[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"'{key}' must be an unsigned integer, got {_got(body, key)}")
    return value


def _got(body: dict[str, Any], key: str) -> str:
    return f"{type_name(body[key])} {body[key]!r:.60}" if key in body else "nothing"


def _print_status(regions: Sequence[Region], _: Any) -> HttpResponse:
    return HttpResponse(
        dumps(
            [
                {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.size}
                for region in regions
            ]
        )
    )


def _empty(_: None, __: Any) -> HttpResponse:
    return HttpResponse(b"")
