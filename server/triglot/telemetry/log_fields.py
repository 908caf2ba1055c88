"""Log fields that identify the requests that a line belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from triglot.core.call import Call

MAX_IDS = 32
"""Limit on the requests of a batch whose ids are logged in one line."""
MAX_TEXT = 256
"""Limit on the characters of a text that clients choose."""


class Message(ABC):
    """The message of a log record about one call, with fields of its own in a log of JSON lines."""

    __slots__ = ()

    @property
    @abstractmethod
    def summary(self) -> str:
        """The text without the fields."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the fields, those of the call included."""


def call_fields(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the ids of the requests, and their client, model and version, as far as they are known.

    One request has `request_id`, `trace_id` and `span_id`; several that are executed together have `batch_size`,
    and the lists `request_ids` and `trace_ids` of at most `MAX_IDS` each.
    """
    calls = tuple(calls)  # Another thread may change the sequence meanwhile.
    if not calls:
        return {}
    first = calls[0]
    fields: dict[str, Any] = _ids(first) if len(calls) == 1 else _ids_of_many(calls)
    if first.client and all(call.client == first.client for call in calls):
        fields["client"] = first.client[:MAX_TEXT]
    if first.model_name:
        fields["model"] = first.model_name[:MAX_TEXT]
    if first.model_version:
        fields["version"] = first.model_version
    return fields


def _ids(call: Call) -> dict[str, Any]:
    request_id, traceparent = call.log_ids
    fields = {"request_id": request_id[:MAX_TEXT]} if request_id else {}
    if traceparent:
        _, fields["trace_id"], fields["span_id"], *_ = traceparent.split("-")
    return fields


def _ids_of_many(calls: Sequence[Call]) -> dict[str, Any]:
    fields: dict[str, Any] = {"batch_size": len(calls)}
    found = [_ids(call) for call in calls[:MAX_IDS]]
    for name in ("request_id", "trace_id"):
        if ids := _distinct(fields[name] for fields in found if name in fields):
            fields[f"{name}s"] = ids
    return fields


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
