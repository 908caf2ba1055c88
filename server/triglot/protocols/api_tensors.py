"""Schemas and descriptions of models' tensors."""

from __future__ import annotations

from collections.abc import Sequence

from triglot.core.tensor import DATATYPES
from triglot.core.types import TensorSpec
from triglot.model.metadata import ModelMetadata
from triglot.model.signature import shape_text
from triglot.protocols.api_operation import BOOLEAN, COUNT, STRING, Schema


def element_schema(datatype: str) -> Schema:
    """Returns the schema of an element in KServe V2's JSON; null is NaN."""
    kind = DATATYPES[datatype].dtype.kind
    if kind in "iu":
        bits = 8 * DATATYPES[datatype].itemsize
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "i" else (0, 2**bits - 1)
        return {"type": "integer", "minimum": least, "maximum": most}
    return {"b": BOOLEAN, "O": STRING}.get(kind, {"type": ["number", "null"]})


def shape_schema(shape: Sequence[int] | None) -> Schema:
    """Returns the schema of a shape with this number of dims; not all tools support tuples."""
    dims = {} if shape is None else {"minItems": len(shape), "maxItems": len(shape)}
    return {"type": "array", "items": COUNT, **dims, "description": shape_text(shape)}


def described(model: ModelMetadata) -> str:
    """Returns a description of the model's versions and tensors."""
    versions = f"Version{'s' if len(model.versions) > 1 else ''} {', '.join(model.versions)} ({model.platform})."
    signature = model.signature
    if signature.any_tensors and not signature.inputs:
        return f"{versions} It takes any tensors."
    inputs = ", ".join(map(_tensor_text, signature.inputs)) or "none"
    return f"{versions} Inputs: {inputs}. Outputs: {', '.join(map(_tensor_text, signature.outputs)) or 'none'}."


def _tensor_text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype} {shape_text(spec.shape)}{' (optional)' if spec.optional else ''}"
