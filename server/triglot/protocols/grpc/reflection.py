"""Server reflection, v1 and v1alpha, over the private descriptor pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FileDescriptor

from triglot.core.call import Call
from triglot.core.errors import NotFound, ServingError, Unimplemented
from triglot.core.operation import Operation
from triglot.pb import POOL
from triglot.pb.grpc.reflection.v1 import reflection_pb2 as v1
from triglot.pb.grpc.reflection.v1alpha import reflection_pb2 as v1alpha
from triglot.protocols.rows import Kind, Method, Service
from triglot.protocols.wire import parse, serialize

T = TypeVar("T")

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def reflection_services(service_names: Sequence[str]) -> list[Service]:
    """Return both versions, which differ only in their package name. `service_names` are the other services."""
    names = sorted([*service_names, *SERVICES])
    return [
        Service(
            service,
            (
                Method(
                    "ServerReflectionInfo",
                    Kind.BIDI_STREAM,
                    Operation.METADATA,
                    partial(parse, version.ServerReflectionRequest),
                    None,
                    serialize,
                    iterate=partial(_answer_all, version, names),
                ),
            ),
        )
        for service, version in zip(SERVICES, (v1, v1alpha), strict=True)
    ]


async def _answer_all(version: Any, names: list[str], requests: AsyncIterator[Any], _: Call) -> AsyncIterator[Any]:
    async for request in requests:
        response = version.ServerReflectionResponse(valid_host=request.host, original_request=request)
        try:
            _answer(request, response, names)
        except ServingError as error:
            response.error_response.error_code = error.code
            response.error_response.error_message = error.message
        yield response


def _answer(request: Any, response: Any, names: list[str]) -> None:
    kind = request.WhichOneof("message_request")
    if kind == "list_services":
        for name in names:
            response.list_services_response.service.add(name=name)
    elif kind == "file_by_filename":
        _add_files(response, _find(POOL.FindFileByName, request.file_by_filename))
    elif kind == "file_containing_symbol":
        _add_files(response, _find(_file_of_symbol, request.file_containing_symbol))
    elif kind == "all_extension_numbers_of_type":
        # proto3 messages have no extensions, which is not an error: grpcurl asks before it prints an Any.
        message = _find(POOL.FindMessageTypeByName, request.all_extension_numbers_of_type)
        response.all_extension_numbers_response.base_type_name = message.full_name
    elif kind == "file_containing_extension":
        raise NotFound("proto3 messages have no extensions")
    else:
        raise Unimplemented("unknown kind of reflection request")


def _find(find: Callable[[str], T], name: str) -> T:
    try:
        return find(name)
    except KeyError:
        raise NotFound(f"'{name}' is not known to this server") from None


def _file_of_symbol(name: str) -> FileDescriptor:
    try:
        return POOL.FindFileContainingSymbol(name)
    except KeyError:
        # The pool does not index methods, only their service.
        service, _, method = name.rpartition(".")
        return POOL.FindServiceByName(service).methods_by_name[method].containing_service.file


def _add_files(response: Any, file: FileDescriptor) -> None:
    """Add the file and all its imports: a client needs no second request."""
    seen: set[str] = set()
    pending = [file]
    while pending:
        current = pending.pop()
        if current.name not in seen:
            seen.add(current.name)
            response.file_descriptor_response.file_descriptor_proto.append(current.serialized_pb)
            pending += current.dependencies
