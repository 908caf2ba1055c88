"""Converts between arrays and GrpsMessages, for calls of a grps project through tensor protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from triglot.backends.grps.gtensors import fill, to_array
from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import Array, object_array
from triglot.pb.grps.grps_pb2 import GrpsMessage

_NUMBERS = {"s_i32": np.int32, "s_i64": np.int64, "s_f": np.float32, "s_d": np.float64}
"""Number maps of a `gmap`; its other maps hold texts and bytes."""


def message_of(inputs: Mapping[str, Array], model: str = "") -> GrpsMessage:
    """Return a message with a tensor per input.

    Raise `InvalidArgument` for a datatype that grps lacks, and for text that is not UTF-8.
    """
    message = GrpsMessage(model=model)
    message.gtensors.SetInParent()
    for name, array in inputs.items():
        try:
            fill(message.gtensors.tensors.add(name=name), array)
        except ValueError as error:
            raise InvalidArgument(f"input {name!r}: {error}") from None
    return message


def arrays_of(message: GrpsMessage) -> dict[str, Array]:
    """Return the tensors of a message by name; unnamed ones are `output`, or several `output_0` and so on.

    `str_data` and `bin_data` become one BYTES element with that name, and each entry of a `gmap` one element.
    Raise `Internal` if the model's message cannot be converted.
    """
    arrays: dict[str, Array] = {}
    for name, array in _named(message):
        if name in arrays:
            raise Internal(f"the model's response has two tensors named {name!r}")
        arrays[name] = array
    return arrays


def _named(message: GrpsMessage) -> Iterator[tuple[str, Array]]:
    kind = message.WhichOneof("data_oneof")
    if kind == "str_data":
        yield kind, object_array([message.str_data.encode()], [1])
    elif kind == "bin_data":
        yield kind, object_array([message.bin_data], [1])
    elif kind == "gtensors":
        yield from _tensors(message)
    elif kind == "gmap":
        yield from _entries(message)


def _tensors(message: GrpsMessage) -> Iterator[tuple[str, Array]]:
    tensors = message.gtensors.tensors
    for index, tensor in enumerate(tensors):
        name = tensor.name or ("output" if len(tensors) == 1 else f"output_{index}")
        try:
            yield name, to_array(tensor)
        except ValueError as error:
            raise Internal(f"the model's response: tensor {name!r}: {error}") from None


def _entries(message: GrpsMessage) -> Iterator[tuple[str, Array]]:
    entries = message.gmap
    for name, text in entries.s_s.items():
        yield name, object_array([text.encode()], [1])
    for name, content in entries.s_b.items():
        yield name, object_array([content], [1])
    for field, dtype in _NUMBERS.items():
        for name, number in getattr(entries, field).items():
            yield name, np.array([number], dtype)
