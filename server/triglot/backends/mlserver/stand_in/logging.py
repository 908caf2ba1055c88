"""MLServer's logger."""

from __future__ import annotations

import logging

logger = logging.getLogger("mlserver")


def get_logger() -> logging.Logger:
    """Return the logger, whose lines are in the server's log."""
    return logger
