"""`ApiOperation`, a REST row's entry in the OpenAPI document, and schemas of models' tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triglot.core.tensor import DATATYPES
from triglot.core.types import TensorSpec
from triglot.model.signature import ModelMetadata, shape_text

Schema = dict[str, Any]
"""JSON Schema of draft 2020-12, as in OpenAPI 3.1."""
Content = dict[str, Schema]
"""Schemas by content type; empty if there is no body."""
JSON, BYTES, TEXT, EVENTS = "application/json", "application/octet-stream", "text/plain", "text/event-stream"
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
BINARY: Schema = {"type": "string", "format": "binary"}
"""Bytes; `format` is OpenAPI 3.0's, by which generators still choose their type for bytes."""
NO_CONTENT: Content = {}
AI_PLATFORM = "AI Platform and Vertex AI"
"""Group of routes without a protocol of their own."""


def ref(name: str) -> Schema:
    """Return a reference to one of the document's named schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_body(schema: Schema) -> Content:
    """Return a JSON body."""
    return {JSON: schema}


def array(items: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with these members; others are allowed."""
    members = {"type": "object", "properties": {**required, **(optional or {})}}
    return members | {"required": list(required)} if required else members


def query(name: str, schema: Schema, description: str) -> Mapping[str, Any]:
    """Return a query parameter."""
    return {"name": name, "in": "query", "schema": schema, "description": description}


def header(name: str, schema: Schema, description: str) -> Mapping[str, Any]:
    """Return a header parameter of the request."""
    return {"name": name, "in": "header", "schema": schema, "description": description}


SCHEMAS: dict[str, Schema] = {"Error": record({"error": STRING})}
ERROR = json_body(ref("Error"))
"""Body of most routes' errors."""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One operation of the document.

    `answer` is the content for status 200, `others` that of further statuses, `error` that of all statuses not
    listed. `parameters` are OpenAPI's; path variables need an entry only for what differs from their defaults.
    `examples` are JSON requests by name, `code` is shell code of a call. `path` is set if it differs from the
    row's, `tag` is the group, if not the protocol's. `model` is the model that the operation belongs to.
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
"""Operation of a row for OPTIONS."""


def element_schema(datatype: str) -> Schema:
    """Return the schema of an element in KServe V2's JSON; null is NaN."""
    kind = DATATYPES[datatype].dtype.kind
    if kind in "iu":
        bits = 8 * DATATYPES[datatype].itemsize
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "i" else (0, 2**bits - 1)
        return {"type": "integer", "minimum": least, "maximum": most}
    return {"b": BOOLEAN, "O": STRING}.get(kind, {"type": ["number", "null"]})


def shape_schema(shape: Sequence[int] | None) -> Schema:
    """Return the schema of a shape with this number of dims; not all tools support tuples."""
    dims = {} if shape is None else {"minItems": len(shape), "maxItems": len(shape)}
    return {"type": "array", "items": COUNT, **dims, "description": shape_text(shape)}


def described(model: ModelMetadata) -> str:
    """Return a description of the model's versions and tensors."""
    versions = f"Version{'s' if len(model.versions) > 1 else ''} {', '.join(model.versions)} ({model.platform})."
    signature = model.signature
    if signature.any_tensors and not signature.inputs:
        return f"{versions} It takes any tensors."
    inputs = ", ".join(map(_tensor_text, signature.inputs)) or "none"
    return f"{versions} Inputs: {inputs}. Outputs: {', '.join(map(_tensor_text, signature.outputs)) or 'none'}."


def _tensor_text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype} {shape_text(spec.shape)}{' (optional)' if spec.optional else ''}"
