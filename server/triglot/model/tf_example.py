"""Parses `tensorflow.Example` messages into arrays, for models whose signatures classify or regress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array, object_array
from triglot.core.types import TensorSpec
from triglot.pb.tfserving import example_pb2

# Datatype → the kind of feature that holds it, and TensorFlow's name for the type.
_KINDS = {
    "FP32": ("float_list", "float"),
    "INT64": ("int64_list", "int64"),
    "BYTES": ("bytes_list", "string"),
}
_TYPE_OF_KIND = dict(_KINDS.values())


def parse_examples(examples: Iterable[bytes], features: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return the `features` of serialized Examples, each an array of shape [number of examples, *feature shape].

    A feature is FP32, INT64 or BYTES, and its shape has no -1. Every example must have it.

    Raise `InvalidArgument` with TensorFlow's text for an example that does not fit (tfs 3.3), and `ValueError`
    for a feature with another datatype or an open shape.
    """
    for spec in features:
        if spec.datatype not in _KINDS or spec.shape is None or -1 in spec.shape:
            raise ValueError(
                f"feature {spec.name!r}: expected {', '.join(_KINDS)} and a shape without -1, got "
                f"{spec.datatype} and {spec.shape}"
            )
    parsed = [_parse(data) for data in examples]
    return {spec.name: _stack(parsed, spec) for spec in features}


def _parse(data: bytes) -> Any:
    try:
        return example_pb2.Example.FromString(bytes(data)).features.feature
    except DecodeError:
        shown = bytes(data).decode(errors="replace")
        raise InvalidArgument(f"Could not parse example input, value: '{shown}'") from None


def _stack(parsed: list[Any], spec: TensorSpec) -> Array:
    kind, type_name = _KINDS[spec.datatype]
    shape = tuple(spec.shape or ())
    count = math.prod(shape)
    values: list[Any] = []
    for index, features in enumerate(parsed):
        found = features[spec.name].WhichOneof("kind") if spec.name in features else None
        if found is None:
            raise InvalidArgument(
                f"Name: <unknown>, Feature: {spec.name} (data type: {type_name}) is required but could not be "
                "found."
            )
        place = f"Name: <unknown>, Key: {spec.name}, Index: {index}. "
        if found != kind:
            raise InvalidArgument(
                f"{place} Data types don't match. Data type: {_TYPE_OF_KIND[found]} but expected type: {type_name}"
            )
        elements = getattr(features[spec.name], kind).value
        if len(elements) != count:
            raise InvalidArgument(
                f"{place} Number of {type_name} values != expected.  Values size: {len(elements)} but output "
                f"shape: [{','.join(map(str, shape))}]"
            )
        values += elements
    full = (len(parsed), *shape)
    if spec.datatype == "BYTES":
        return object_array(values, full)
    return np.array(values, DATATYPES[spec.datatype].dtype).reshape(full)
