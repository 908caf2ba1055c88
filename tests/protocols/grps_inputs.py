"""Messages in a few words, and what a model with a given signature gets of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, Array
from triglot.core.types import InferenceRequest, TensorSpec
from triglot.model.grps_types import LISTS
from triglot.model.signature import Signature
from triglot.model.validation import InvalidRequest, bind_inputs
from triglot.protocols.grps.mapping import bind_message
from triglot.protocols.grps.message import Data, GrpsTensor, Message


def tensor(dtype: int, elements: Any, shape: tuple[int, ...] | None = None, name: str = "") -> GrpsTensor:
    """A tensor of one DataType; without a shape, a flat one."""
    array = np.array(elements, LISTS[dtype].wire if dtype in LISTS else "f4")
    return GrpsTensor(name, dtype, (array.size,) if shape is None else shape, array)


def ndarray(*values: float, shape: tuple[int, ...] | None = None) -> Message:
    return Message(data=[tensor(7, values, shape)], from_ndarray=True)


def signature(*inputs: tuple[str, str, list[int] | None], defaults: dict[str, Array] | None = None) -> Signature:
    return Signature([TensorSpec(*tensor) for tensor in inputs], [], defaults=defaults or {})


def inputs(message: Message | Data, wanted: Signature) -> dict[str, Array]:
    """The inputs that a model with this signature gets."""
    if not isinstance(message, Message):
        message = Message(data=message)
    request = InferenceRequest("m", inputs=bind_message(message, wanted, "m"))
    return bind_inputs(wanted, request)


def refusal(message: Message | Data, wanted: Signature, kind: type[InvalidArgument] = InvalidRequest) -> str:
    with pytest.raises(kind) as caught:
        inputs(message, wanted)
    return caught.value.message


def would_change(datatype: str, kind: str) -> str:
    """The text of the error for a cast that is none."""
    return f"input 'x' of model 'm' expects {datatype}; the {kind} value cannot be converted without changing it"


NUMBERS = [name for name in DATATYPES if name not in ("BYTES", *TFSERVING_DATATYPES)]
ONE = signature(("x", "FP32", [-1]))
TWO = signature(("x", "FP32", [-1]), ("y", "INT64", [-1]))
WORD = signature(("word", "BYTES", [1]))
