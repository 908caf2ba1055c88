"""The wire contracts as protobuf classes.

Strategy: everything lives in a descriptor pool of our own. protoc's usual modules register their messages for
the whole process, and a client library that declares the same names (`tritonclient`, `kserve`, `tensorflow`)
could then no longer be imported beside us. The descriptors come from one file and load under any protobuf
release from 4 on, whereas protoc's Python output is tied to a release.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal import api_implementation, enum_type_wrapper

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

__all__ = ["POOL", "load_file", "service"]


def _refuse_pure_python() -> None:
    # The pure-Python parser does not bound recursion in every place: a small request could end the process.
    backend = api_implementation.Type()
    if backend not in ("upb", "cpp"):
        raise ImportError(
            f"protobuf runs on its {backend!r} implementation, which is not safe for requests from the "
            "network: install a protobuf wheel with the upb implementation, and leave "
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION unset"
        )


def _load_pool() -> DescriptorPool:
    pool = DescriptorPool()
    encoded = Path(__file__).with_name("descriptors.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(encoded).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def load_file(name: str) -> dict[str, Any]:
    """The names that one proto file declares at its top level: message classes, enums, and the enums' values.

    `DESCRIPTOR` is the file's descriptor, as in the modules that protoc makes.
    """
    file = POOL.FindFileByName(name)
    names: dict[str, Any] = {"DESCRIPTOR": file}
    for message in file.message_types_by_name.values():
        names[message.name] = message_factory.GetMessageClass(message)
    for enum in file.enum_types_by_name.values():
        names[enum.name] = enum_type_wrapper.EnumTypeWrapper(enum)
        names.update((value.name, value.number) for value in enum.values)
    return names


def service(full_name: str) -> ServiceDescriptor:
    """The descriptor of a service, by its full name; `KeyError` when there is none."""
    return POOL.FindServiceByName(full_name)


_refuse_pure_python()
POOL = _load_pool()
