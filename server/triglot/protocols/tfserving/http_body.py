"""Requests in a `google.api.HttpBody`, as Google's generated clients send them (tfs 7.1). Pure functions."""

from __future__ import annotations

import binascii
import json
import re

from triglot.core.errors import InvalidArgument
from triglot.model.signature import INSTANCES
from triglot.protocols.json.dialect import type_name
from triglot.protocols.json.limits import JsonLimits
from triglot.protocols.tfserving.json_models import read_object

WRAPPER, DATA, CONTENT_TYPE = "httpBody", "data", "contentType"
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_IS_WRAPPED = re.compile(rb'\s*\{\s*"%b"' % WRAPPER.encode())


def unwrapped(body: bytes, limits: JsonLimits) -> tuple[bytes, str | None]:
    """Returns the request in a body, and its content type; of a body that is no HttpBody the body, and None.

    The `data` are base64, or the request's JSON, as a string or as it is; without `data` the HttpBody is the
    request.

    Raises `InvalidArgument`.
    """
    if not _IS_WRAPPED.match(body):
        return body, None
    values = read_object(body, limits)
    content = values.get(WRAPPER)
    if INSTANCES in values or not isinstance(content, dict):
        return body, None
    content_type = content.get(CONTENT_TYPE)
    return _data(content), content_type if isinstance(content_type, str) else ""


def _data(content: dict[str, object]) -> bytes:
    data = content.get(DATA)
    if data is None:
        return json.dumps(content).encode()
    if isinstance(data, dict):
        return json.dumps(data).encode()
    if not isinstance(data, str):
        raise InvalidArgument(f"{WRAPPER}.{DATA}: expected a string or an object, got {type_name(data)}")
    if data.lstrip().startswith("{"):
        return data.encode(errors="surrogatepass")
    try:
        text = data.translate(_STANDARD_BASE64).rstrip("=")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:
        raise InvalidArgument(f"{WRAPPER}.{DATA}: expected base64 or a JSON object: {error}") from None
