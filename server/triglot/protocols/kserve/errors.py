"""KServe V2's form of errors that all protocols share."""

from __future__ import annotations

from triglot.core.errors import QueueFull, ServingError
from triglot.model.validation import InvalidRequest


def name_request(error: ServingError, request_id: str) -> ServingError:
    """Prefix the text of an invalid or rejected request's error with the request's id (spec 1.5)."""
    if isinstance(error, InvalidRequest | QueueFull):
        error.message = f"[request id: {request_id or '<id_unknown>'}] {error.message}"
    return error
