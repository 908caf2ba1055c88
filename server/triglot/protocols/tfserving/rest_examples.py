"""`:classify` and `:regress` of TensorFlow Serving's REST interface: JSON ⇄ examples and results (tfs 4.5).

Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.core.tensor import Array
from triglot.pb.tfserving.example_pb2 import BytesList, Example, Feature, FloatList, Int64List
from triglot.protocols.json.dialect import DEFAULT_LIMITS, JsonLimits
from triglot.protocols.json.text import read_object
from triglot.protocols.tfserving.json_dialect import EXAMPLES
from triglot.protocols.tfserving.json_printer import (
    base64_text,
    body_error,
    decode_base64,
    is_plain_object,
    json_type,
    print_answer,
    print_floats,
    print_line,
    print_rows,
    quote,
    raw,
    signature_name_of,
    text_of,
)
from triglot.protocols.tfserving.rest_predict import to_array
from triglot.protocols.wire import serialize

_INTEGER = re.compile(
    r"Key: (.+), Index: \d+\.  Data types don't match\. Data type: int64 but expected type: float"
)
MAX_CONTEXT_BYTES = 64 * 1024 * 1024
"""Most bytes of a context, copied into all examples, in total."""


@dataclass(frozen=True, slots=True)
class ExamplesBody:
    """A `:classify` or `:regress` body: its examples as serialized `tensorflow.Example`s with the context."""

    signature_name: str
    examples: list[bytes]


def decode_examples(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> ExamplesBody:
    """Return the request of a body. All of it is read before the model is looked up (unlike `:predict`).

    Raise `InvalidArgument`.
    """
    request = read_object(body, limits, EXAMPLES)
    name = signature_name_of(request)
    context = request.get("context")
    shared = b"" if context is None else _example(context)
    if "examples" not in request:
        raise body_error(request, "When method is classify, key 'examples' is expected and was not found")
    examples = request["examples"]
    if not isinstance(examples, list):
        raise body_error(request, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise body_error(request, "'examples' value is an empty array")
    if len(shared) * len(examples) > MAX_CONTEXT_BYTES:
        raise PayloadTooLarge(f"a context of {len(shared)} bytes is too large for {len(examples)} examples")
    # Concatenated messages are merged; of equal feature names the later one, the example's, counts.
    return ExamplesBody(name, [shared + _example(example) for example in examples])


def _example(value: Any) -> bytes:
    """Return a serialized `tensorflow.Example`. Of equal feature names the last one counts."""
    if not isinstance(value, dict):
        raise InvalidArgument(f"Example must be JSON object but got JSON {json_type(value)}")
    example = Example()
    features = example.features.feature
    for key, content in value.items():
        feature = _feature(text_of(key), content if isinstance(content, list) else [content])
        try:
            features[key].CopyFrom(feature)
        except UnicodeEncodeError:
            raise InvalidArgument(f"Feature: {text_of(key)} has a name that is not UTF-8") from None
    return serialize(example)


def _feature(name: str, contents: list[Any]) -> Feature:
    """Return a feature with the type of its first element; an empty one has no type."""
    kind = ""
    values: list[Any] = []
    for content in contents:
        if content is None or isinstance(content, list) or is_plain_object(content):
            raise InvalidArgument(f"Feature: {name} has element with unexpected JSON type: {json_type(content)}")
        own_kind = "float" if isinstance(content, float) else "int64" if isinstance(content, int) else "bytes"
        kind = kind or own_kind
        if own_kind != kind:
            raise InvalidArgument(f"Unexpected element type in feature: {name} expecting type: {kind}")
        if isinstance(content, int) and content >= 2**63:
            raise InvalidArgument(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
        text = base64_text(content)
        values.append(
            decode_base64(text) if text is not None else raw(content) if own_kind == "bytes" else content
        )
    if kind == "float":
        return Feature(float_list=FloatList(value=to_array(values, "FP32").tolist()))
    if kind == "int64":
        return Feature(int64_list=Int64List(value=map(int, values)))
    return Feature(bytes_list=BytesList(value=values)) if kind else Feature()


def advice(text: str) -> str:
    """Return what to add to a model's error about an integer for a feature of floats; "" for another error.

    TensorFlow Serving takes `1` for an integer, too, and the model's error does not say what JSON needs (tfs 4.5).
    """
    found = _INTEGER.search(text)
    return "" if found is None else f"; in JSON write {found[1]}'s numbers with a point, 1.0 instead of 1"


def encode_classifications(results: Sequence[Sequence[tuple[bytes, float]]]) -> bytes:
    """Return the body for `:classify`: labels and FP32 scores of each example.

    Raise `InvalidArgument` for none.
    """
    if not results:
        raise InvalidArgument("Cannot convert empty ClassificationResults to JSON")
    scores = iter(print_floats([score for classes in results for _, score in classes]))
    texts = [[print_line([quote(label), next(scores)]) for label, _ in classes] for classes in results]
    return print_answer("results", print_rows([print_line(classes) for classes in texts]))


def encode_regressions(values: Sequence[float] | Array) -> bytes:
    """Return the body for `:regress`: an FP32 value for each example. Raise `InvalidArgument` for none."""
    if not len(values):
        raise InvalidArgument("Cannot convert empty RegressionResults to JSON")
    return print_answer("results", print_line(print_floats(values)))
