"""What a library's exception says, fit for a client."""

from __future__ import annotations

import re

_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
_TRACE = "\nStack trace:"


def error_text(error: Exception) -> str:
    """The text without the times, source files and addresses that xgboost puts into its own."""
    return _PLACE.sub("", str(error)).partition(_TRACE)[0].strip()
