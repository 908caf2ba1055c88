"""Bodies of `:predict` for the tests, and what they are read as in every way there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from triglot.core.errors import ServingError
from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.protocols.json.text import LARGE_FROM_BYTES
from triglot.protocols.tfserving.rest_predict import PredictBody, decode_predict

FLOAT = {"x": "FP32"}
STRING = {"s": "BYTES"}
MULTI = {"int_tensor": "INT32", "str_tensor": "BYTES"}
BLANKS = b" " * LARGE_FROM_BYTES
# Not strict JSON: orjson leaves such a text to Python's own parser.
JUNK = b" }"
FORMS = [b"", BLANKS, JUNK, BLANKS + JUNK]


def signature(inputs: dict[str, str]) -> Callable[[str], Signature]:
    specs = [TensorSpec(name, datatype, None) for name, datatype in inputs.items()]
    return lambda _: Signature(specs, [])


def decode(body: bytes | str, inputs: dict[str, str]) -> PredictBody:
    """The body, which all ways of reading it agree on."""
    text = body.encode() if isinstance(body, str) else body
    bodies = [decode_predict(text + form, signature(inputs)) for form in FORMS]
    assert len({repr_of(decoded) for decoded in bodies}) == 1
    return bodies[0]


def repr_of(body: PredictBody) -> str:
    tensors = [
        (tensor.name, tensor.datatype, tensor.shape, array.dtype.str, array.shape, repr(array.tolist()))
        for tensor in body.inputs
        for array in [np.asarray(tensor.data)]
    ]
    return repr((body.signature_name, body.row, tensors))


def values(body: PredictBody) -> dict[str, Any]:
    return {tensor.name: np.asarray(tensor.data).reshape(tensor.shape).tolist() for tensor in body.inputs}


def error_of(body: bytes | str, inputs: dict[str, str]) -> ServingError:
    text = body.encode() if isinstance(body, str) else body
    errors = []
    for form in (b"", BLANKS):
        with pytest.raises(ServingError) as caught:
            decode_predict(text + form, signature(inputs))
        errors.append(caught.value)
    assert errors[0].message == errors[1].message
    return errors[0]
