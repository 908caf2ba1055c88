"""GrpsMessages, whichever package's class they are."""

from __future__ import annotations

from typing import Any, TypeGuard

from google.protobuf.message import DecodeError, Message

from triglot.core.errors import InvalidArgument
from triglot.pb.grps.grps_pb2 import GrpsMessage, Status

FULL_NAME = GrpsMessage.DESCRIPTOR.full_name
NOT_A_MESSAGE = "Output type must be GrpsMessage."
"""What a client is told when a model answers with something else (grps 3.4)."""


def is_message(value: Any) -> TypeGuard[GrpsMessage]:
    """Whether `value` is a GrpsMessage: of our descriptor pool, or of any other that declares it (grps 1)."""
    return isinstance(value, Message) and value.DESCRIPTOR.full_name == FULL_NAME


def parsed(encoded: bytes) -> GrpsMessage:
    """The message of these bytes. Raises `InvalidArgument` when they are none."""
    try:
        return GrpsMessage.FromString(encoded)
    except DecodeError as error:
        raise InvalidArgument(f"the request is not a GrpsMessage: {error}") from None


def as_ours(message: Message) -> GrpsMessage:
    """The message as one of our class; the same object when it is."""
    return message if isinstance(message, GrpsMessage) else GrpsMessage.FromString(message.SerializeToString())


def mark_success(message: GrpsMessage) -> None:
    """Give a message of a stream the status of success, unless it says that it is a failure (grps 3.5)."""
    status = message.status
    if status.status != Status.FAILURE:
        status.code = 200
        status.msg = "OK"
        status.status = Status.SUCCESS
