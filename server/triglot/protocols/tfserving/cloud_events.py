"""CloudEvents of KServe's V1 protocol: a request's event, and the one that answers it (V2 spec 4.4).

Pure functions. An event is answered in the request's form, binary or structured, as KServe's server does (0.21).
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.scattered import Scattered
from triglot.protocols.json.limits import JsonLimits
from triglot.protocols.tfserving.json_models import read_object

STRUCTURED = "application/cloudevents+json"
RESPONSE_TYPE = "io.kserve.inference.response"
SOURCE_PREFIX = "io.kserve.inference."
_REQUIRED = ("specversion", "id", "source", "type")
_VERSIONS = ("1.0", "0.3")
_HEADERS = tuple(f"ce-{name}" for name in _REQUIRED)


@dataclass(frozen=True, slots=True)
class Event:
    """A request's event: its `data`, the request itself, and whether it was structured."""

    data: bytes
    structured: bool

    def response(self, model: str, body: bytes | Scattered) -> HttpResponse:
        """Returns the event that answers this one, with a model's response as its data."""
        attributes = {
            "specversion": "1.0",
            "id": str(uuid.uuid4()),
            "source": SOURCE_PREFIX + model,
            "type": RESPONSE_TYPE,
            "time": datetime.now(UTC).isoformat(),
        }
        if not self.structured:
            return HttpResponse(body, headers={f"ce-{name}": value for name, value in attributes.items()})
        head = json.dumps({**attributes, "datacontenttype": "application/json"}).encode()
        pieces = body.pieces if isinstance(body, Scattered) else [body]
        return HttpResponse(Scattered([head[:-1], b', "data": ', *pieces, b"}"]), content_type=STRUCTURED)


def event_of(http: HttpRequest, limits: JsonLimits) -> Event | None:
    """Returns the event in a request, None if it is a plain one.

    Raises `InvalidArgument` for an event without a required attribute, of another specification or without data.
    """
    headers = http.headers
    if all(name in headers for name in _HEADERS):
        _check({name: headers[f"ce-{name}"] for name in _REQUIRED})
        return Event(bytes(http.body), structured=False)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != STRUCTURED:
        return None
    members = read_object(bytes(http.body), limits)
    _check(members)
    return Event(_data(members), structured=True)


def _check(attributes: Mapping[str, Any]) -> None:
    for name in _REQUIRED:
        value = attributes.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidArgument(f"CloudEvent: expected the attribute '{name}' as a string, got {value!r:.60}")
    if attributes["specversion"] not in _VERSIONS:
        got = f"{attributes['specversion']!r:.60}"
        raise InvalidArgument(f"CloudEvent: specversion: expected one of {', '.join(_VERSIONS)}, got {got}")


def _data(members: Mapping[str, Any]) -> bytes:
    """Returns the data of a structured event: JSON, or base64 of it."""
    if (data := members.get("data")) is not None:
        return json.dumps(data).encode()
    encoded = members.get("data_base64")
    if not isinstance(encoded, str):
        raise InvalidArgument("CloudEvent: expected 'data', or 'data_base64', got none")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"CloudEvent: data_base64: expected base64, got something else: {error}") from None
