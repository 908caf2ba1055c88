"""grps' form of errors: the message's status, with an HTTP-like code (grps 0, 3.4, 4)."""

from __future__ import annotations

from triglot.core.errors import Code, InvalidArgument, PayloadTooLarge, ServingError
from triglot.protocols.grps.message import FAILURE, Status

_STATUS = {
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


class BadRequest(InvalidArgument):
    """A request that is rejected before its content is decoded (grps 3.3)."""


class NoSuchModel(InvalidArgument):
    """ModelMetadata for a model that does not exist; unlike Predict it answers 404 (grps 3.7)."""


def failure_of(error: ServingError) -> Status:
    """Returns the status of an error. Errors in a model's input are 500, as in grps itself."""
    return Status(_code(error), error.message, FAILURE)


def _code(error: ServingError) -> int:
    if isinstance(error, BadRequest):
        return 400
    if isinstance(error, NoSuchModel):
        return 404
    if isinstance(error, PayloadTooLarge):
        return 413
    return _STATUS.get(error.code, 500)
