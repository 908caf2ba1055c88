"""Decodes HTTP messages, as JSON on standard input, with the package cloudevents; prints attributes and data."""

from __future__ import annotations

import json
import sys

from cloudevents.core.bindings.http import HTTPMessage, from_http
from cloudevents.core.formats.json import JSONFormat

messages = [HTTPMessage(headers, body.encode()) for headers, body in json.load(sys.stdin)]
events = [from_http(message, JSONFormat()) for message in messages]
print(json.dumps([[event.get_attributes(), event.get_data()] for event in events], default=str))
