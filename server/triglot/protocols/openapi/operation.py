"""What a REST row says of itself for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]
"""JSON Schema of draft 2020-12, as OpenAPI 3.1 has it."""
Content = dict[str, Schema]
"""Schemas by content type; empty where there is no body."""
JSON, BYTES, TEXT, EVENTS = "application/json", "application/octet-stream", "text/plain", "text/event-stream"
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
NO_CONTENT: Content = {}
AI_PLATFORM = "AI Platform and Vertex AI"
"""A group that is no protocol of its own."""


def ref(name: str) -> Schema:
    """One of the document's named schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_body(schema: Schema) -> Content:
    """A body of JSON."""
    return {JSON: schema}


def array(items: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": items}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these members; others may be there, too."""
    members = {"type": "object", "properties": {**required, **(optional or {})}}
    return members | {"required": list(required)} if required else members


def query(name: str, schema: Schema, description: str) -> Mapping[str, Any]:
    """A parameter in the query."""
    return {"name": name, "in": "query", "schema": schema, "description": description}


def header(name: str, schema: Schema, description: str) -> Mapping[str, Any]:
    """A header field of the request."""
    return {"name": name, "in": "header", "schema": schema, "description": description}


SCHEMAS: dict[str, Schema] = {"Error": record({"error": STRING})}
ERROR = json_body(ref("Error"))
"""As most routes tell an error."""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One operation of the document.

    `answer` is that of status 200, `others` those of further statuses, `error` that of every status which is not
    listed. `parameters` are OpenAPI's, but for those in the path, of which only what is special needs to be said.
    `examples` are JSON requests by name, `code` is shell code that calls it. `path`: where it is not the row's.
    `tag`: the group that it is in, if not its protocol's. `model`: the one that it is of.
    """

    summary: str
    answer: Content = field(default_factory=dict)
    request: Content = field(default_factory=dict)
    description: str = ""
    others: Mapping[int, Content] = field(default_factory=dict)
    error: Content = field(default_factory=ERROR.copy)
    parameters: Sequence[Mapping[str, Any]] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    path: str = ""
    tag: str = ""
    model: str = ""
    body_required: bool = True


ALLOW = ApiOperation("The allowed methods, in the header Allow")
"""Of a row for OPTIONS."""
