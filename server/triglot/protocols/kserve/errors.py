"""How KServe V2 words the errors that every protocol shares."""

from __future__ import annotations

from triglot.core.errors import QueueFull, ServingError
from triglot.model.validation import InvalidRequest


def name_request(error: ServingError, request_id: str) -> ServingError:
    """The error of a request that did not fit or was refused begins with the request's id (spec 1.5)."""
    if isinstance(error, InvalidRequest | QueueFull):
        error.message = f"[request id: {request_id or '<id_unknown>'}] {error.message}"
    return error
