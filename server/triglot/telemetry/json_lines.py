"""Lines of JSON: one object per line, whatever text it contains."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from triglot.core.current_calls import CURRENT_CALLS
from triglot.telemetry.log_fields import MAX_TEXT, Message, call_fields
from triglot.telemetry.log_handlers import OWN_LOGGER, message_of, stack_of, traceback_of


def utc_time(seconds: float) -> str:
    """Return the time in RFC 3339, in UTC with microseconds. `seconds` are since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def json_line(fields: Mapping[str, Any]) -> str:
    """Return the object as one line without its end; unprintable characters, line separators too, are escaped."""
    line = json.dumps(fields, ensure_ascii=False)
    return (
        line
        if line.isprintable()
        else "".join([character if character.isprintable() else _escaped(character) for character in line])
    )


def _escaped(character: str) -> str:
    # A lone surrogate cannot be encoded as UTF-8, and strict readers reject it.
    return "\ufffd" if "\ud800" <= character <= "\udfff" else json.dumps(character)[1:-1]


class JsonFormatter(logging.Formatter):
    """Formats a record as an object, with the ids of the requests that it belongs to, and the fields `origin`."""

    def __init__(self, origin: Mapping[str, Any]) -> None:
        super().__init__()
        self.origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """See the base class."""
        line = record.msg if isinstance(record.msg, Message) else None
        fields: dict[str, Any] = {
            "time": utc_time(record.created),
            "level": record.levelname[:MAX_TEXT],
            "logger": record.name[:MAX_TEXT],
            "message": message_of(record) if line is None else line.summary,
            **self.origin,
        }
        if line is not None:
            fields |= line.fields()
        elif record.name != OWN_LOGGER:
            fields |= call_fields(CURRENT_CALLS.get())
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = traceback_of(self, record.exc_info)
        if record.stack_info:
            fields["stack"] = stack_of(record.stack_info)
        return json_line(fields)
