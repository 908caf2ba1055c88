"""Loggers that several rooms know."""

from __future__ import annotations

MODELS = "triglot.models"
"""What models' code says to the server's log."""
