"""What both transports do with an exception that leaves a call."""

from __future__ import annotations

import logging
import uuid

from triglot.core.errors import Internal, ServingError

log = logging.getLogger(__name__)


def explain(error: Exception, operation: str) -> ServingError:
    """What the client is told: our own errors as they are, anything else as INTERNAL with an id for the log."""
    if isinstance(error, ServingError):
        return error
    number = uuid.uuid4().hex[:12]
    log.error("%s failed, error %s", operation, number, exc_info=error)
    return Internal(f"internal error {number}; the server's log has the details")
