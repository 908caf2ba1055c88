"""Cleans the texts of library exceptions for clients."""

from __future__ import annotations

import re

_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
_TRACE = "\nStack trace:"


def error_text(error: Exception) -> str:
    """Return the text without the times, source files and stack traces that XGBoost includes."""
    return _PLACE.sub("", str(error)).partition(_TRACE)[0].strip()
