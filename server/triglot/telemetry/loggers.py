"""Names of loggers that several modules use."""

from __future__ import annotations

OURS = "triglot"
MODELS = "triglot.models"
"""Logger of the models' own code."""
ACCESS = "triglot.access"
"""Logger of the access log."""
DATES = {False: "%H:%M:%S", True: "%Y-%m-%dT%H:%M:%SZ"}
"""Date formats, by whether the time is in UTC."""
