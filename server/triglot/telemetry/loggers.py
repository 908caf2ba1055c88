"""Loggers that several rooms know."""

from __future__ import annotations

OURS = "triglot"
MODELS = "triglot.models"
"""What models' code says to the server's log."""
DATES = {False: "%H:%M:%S", True: "%Y-%m-%dT%H:%M:%SZ"}
"""How the time is written, by whether it is UTC's."""
