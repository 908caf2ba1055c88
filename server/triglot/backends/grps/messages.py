"""GrpsMessages of any protobuf descriptor pool."""

from __future__ import annotations

from typing import Any, TypeGuard

from google.protobuf.message import DecodeError, Message

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import MessageBytes
from triglot.pb.grps.grps_pb2 import GrpsMessage, Status

FULL_NAME = GrpsMessage.DESCRIPTOR.full_name
NOT_A_MESSAGE = "Output type must be GrpsMessage."
"""Error for clients if a model returns anything else (grps 3.4)."""


def is_message(value: Any) -> TypeGuard[GrpsMessage]:
    """Whether `value` is a GrpsMessage, of our descriptor pool or of any other that declares it (grps 1)."""
    return isinstance(value, Message) and value.DESCRIPTOR.full_name == FULL_NAME


def parse(encoded: MessageBytes) -> GrpsMessage:
    """Parse a message. Raise `InvalidArgument` for malformed bytes."""
    try:
        return GrpsMessage.FromString(encoded)  # type: ignore[arg-type]  # A view, too.
    except DecodeError as error:
        raise InvalidArgument(f"the request is not a GrpsMessage: {error}") from None


def as_own_class(message: Message) -> GrpsMessage:
    """Return the message as an instance of our class; the same object if it is one."""
    return message if isinstance(message, GrpsMessage) else GrpsMessage.FromString(message.SerializeToString())


def mark_success(message: GrpsMessage) -> None:
    """Set the status of a stream's message to success, unless it is marked as a failure (grps 3.5)."""
    status = message.status
    if status.status != Status.FAILURE:
        status.code = 200
        status.msg = "OK"
        status.status = Status.SUCCESS
