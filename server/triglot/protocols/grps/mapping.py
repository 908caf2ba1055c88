"""Maps messages to inputs, and outputs to messages, of tensor models (grps 1, 2.4). Pure functions.

This decides only what grps' messages leave open. Whether all inputs are given, in the declared shapes, is checked
by `model.validation`, as for all protocols.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    Array,
    bytes_elements,
    datatype_of,
    element_count,
    object_array,
)
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor, TensorSpec
from triglot.model.signature import Signature, shape_text
from triglot.model.validation import InvalidRequest
from triglot.protocols.grps.message import OK, Data, GrpsMap, GrpsTensor, Message, NDArray
from triglot.protocols.grps.tensors import DTYPES, dtype_text, input_tensor, lossless, tensor_of, utf8

_KINDS = {str: "str_data", bytes: "bin_data", list: "gtensors", NDArray: "ndarray", GrpsMap: "gmap"}
_MAP_DATATYPES = {"s_i32": "INT32", "s_i64": "INT64", "s_f": "FP32", "s_d": "FP64"}


def bind_message(message: Message, signature: Signature, model_name: str) -> list[InputTensor]:
    """Return the message's data as inputs of a model that declares them.

    gtensors are inputs by name or, if unnamed, in the order of the inputs. str_data and bin_data are a BYTES input
    of one element, an ndarray is one input, and each entry of a gmap is one input of one element. An ndarray and a
    gmap's numbers are cast to the declared datatype if no value changes, and so are gtensors if grps lacks the
    declared datatype.

    Raise `InvalidArgument` for the data itself, as `InvalidRequest` if it does not fit the signature.
    """
    data = message.data
    binding = _Binding(signature, model_name)
    if isinstance(data, list):
        if message.from_ndarray:
            return [binding.ndarray(data[0])]
        return binding.tensors(data)
    if isinstance(data, GrpsMap):
        return [binding.single(binding.by_name(name, kind), value) for kind, name, value in _entries(data)]
    if isinstance(data, str | bytes):
        return [binding.single(binding.only(data), _text_array(data))]
    if data is None and all(spec.name in signature.may_lack for spec in signature.inputs):
        return []
    raise binding.mismatch(data)


class _Binding:
    """Binds data to the inputs of a model's signature."""

    def __init__(self, signature: Signature, model_name: str) -> None:
        self._signature = signature
        self._model = model_name

    def mismatch(self, data: Data) -> InvalidRequest:
        """Return the error for a kind of data that cannot be these inputs."""
        takes = ", ".join(
            [f"'{spec.name}' ({spec.datatype} {shape_text(spec.shape)})" for spec in self._signature.inputs]
        )
        got = "no data"
        if isinstance(data, NDArray):
            got = "ndarray, which is always empty in a protobuf message"
        elif data is not None:
            got = _KINDS[type(data)]
        return InvalidRequest(f"model '{self._model}' expects {takes or 'no inputs'}; the message has {got}")

    def only(self, data: Data) -> TensorSpec:
        """Return the only required input. Raise `InvalidRequest` if there is not exactly one."""
        inputs = self._signature.inputs
        if self._signature.unnamed is not None:
            inputs = [self._signature.unnamed]
        needed = [spec for spec in inputs if len(inputs) == 1 or spec.name not in self._signature.may_lack]
        if len(needed) != 1 or (isinstance(data, str | bytes) and needed[0].datatype != "BYTES"):
            raise self.mismatch(data)
        return needed[0]

    def by_name(self, name: str, kind: str) -> TensorSpec:
        """Return the input for an entry of a gmap. Raise `InvalidRequest`."""
        rule = self._signature.input_rules.get(name)
        if rule is None:
            raise InvalidRequest(
                f"unexpected inference input '{name}' in {kind} for model '{self._model}', which has "
                f"{list(self._signature.input_rules)}"
            )
        return rule.spec

    def tensors(self, tensors: list[GrpsTensor]) -> list[InputTensor]:
        """Return tensors as inputs by name, or in the order of the inputs."""
        specs = self._signature.inputs
        if self._signature.unnamed is not None and len(tensors) == 1:
            specs = [self._signature.unnamed]
        if _are_named(tensors):
            rules = self._signature.input_rules
            return [
                self._declared(tensor, tensor.name, rules[tensor.name].spec if tensor.name in rules else None)
                for tensor in tensors
            ]
        if len(tensors) > len(specs):
            raise InvalidRequest(
                f"model '{self._model}' has {len(specs)} inputs, {[spec.name for spec in specs]}; the message has "
                f"{len(tensors)} unnamed tensors"
            )
        # Fewer are valid if the other inputs are optional.
        return [self._declared(tensor, spec.name, spec) for tensor, spec in zip(tensors, specs, strict=False)]

    def _declared(self, tensor: GrpsTensor, name: str, spec: TensorSpec | None) -> InputTensor:
        """Return the tensor as its input, unchanged if its name is unknown or the model takes any inputs."""
        given = input_tensor(tensor, name)
        if spec is None or given.datatype == spec.datatype or self._signature.any_inputs:
            return given
        wanted = DTYPES.get(spec.datatype)
        if wanted is not None:
            raise InvalidRequest(
                f"input '{name}' of model '{self._model}' expects {dtype_text(wanted)} ({spec.datatype}), got "
                f"{dtype_text(tensor.dtype)} ({given.datatype})"
            )
        return self._cast(given, spec, dtype_text(tensor.dtype))

    def ndarray(self, tensor: GrpsTensor) -> InputTensor:
        """Return a JSON ndarray, whose numbers have no datatype, as the only input."""
        spec = self.only([tensor])
        return self._cast(input_tensor(tensor, spec.name), spec, "ndarray")

    def single(self, spec: TensorSpec, value: Array) -> InputTensor:
        """Return an input of one element."""
        shape = (1,) if spec.shape is None else tuple([1 if dim == -1 else dim for dim in spec.shape])
        if element_count(shape) != 1:
            raise InvalidRequest(
                f"input '{spec.name}' of model '{self._model}' expects shape {shape_text(spec.shape)}, which a "
                "single value cannot fill; send gtensors"
            )
        datatype = datatype_of(value)
        given = InputTensor(spec.name, datatype, shape, value)
        return given if datatype == spec.datatype else self._cast(given, spec, datatype)

    def _cast(self, given: InputTensor, spec: TensorSpec, kind: str) -> InputTensor:
        data = given.data
        cast = lossless(data, spec.datatype) if isinstance(data, np.ndarray) else None
        if cast is None:
            raise InvalidRequest(
                f"input '{spec.name}' of model '{self._model}' expects {spec.datatype}; the {kind} value cannot "
                "be converted without changing it"
            )
        return InputTensor(spec.name, spec.datatype, given.shape, cast)


def _are_named(tensors: list[GrpsTensor]) -> bool:
    """Whether the tensors have names. Raise `InvalidArgument` if only some have."""
    named = [tensor.name for tensor in tensors if tensor.name]
    if named and len(named) < len(tensors):
        raise InvalidArgument(
            f"{len(named)} of {len(tensors)} tensors are named, {named}: expected names for all or for none"
        )
    return bool(named)


def _text_array(data: str | bytes) -> Array:
    return object_array([utf8(data, "str_data") if isinstance(data, str) else data], (1,))


def _entries(data: GrpsMap) -> Iterator[tuple[str, str, Array]]:
    """Yield for each entry its map's name, its own name, and its value as a flat array of one element."""
    texts: dict[str, Mapping[str, str | bytes]] = {"s_s": data.s_s, "s_b": data.s_b}
    for kind, entries in texts.items():
        for name, text in entries.items():
            yield kind, name, _text_array(text)
    for kind, datatype in _MAP_DATATYPES.items():
        numbers: Mapping[str, float] = getattr(data, kind)
        for name, number in numbers.items():
            yield kind, name, np.array([number], DATATYPES[datatype].dtype)


def tensors_of(message: Message) -> list[InputTensor]:
    """Return the message's data as inputs of a model that takes any.

    Unnamed ones are `input_0`, `input_1` and so on.

    Raise `InvalidArgument`.
    """
    data = message.data
    if isinstance(data, list):
        named = _are_named(data)
        return [
            input_tensor(tensor, tensor.name if named else f"input_{number}") for number, tensor in enumerate(data)
        ]
    if isinstance(data, str | bytes):
        return [InputTensor("input_0", "BYTES", (1,), _text_array(data))]
    if isinstance(data, GrpsMap):
        return [InputTensor(name, datatype_of(value), (1,), value) for _, name, value in _entries(data)]
    return []


def answer_message(response: InferenceResponse, request_message: Message | None) -> Message:
    """Return text or bytes if the request had those and the output is one BYTES element, else gtensors.

    `request_message` is the request's message, None for one of gtensors. The status is OK.
    """
    outputs = response.outputs
    data = None if request_message is None else request_message.data
    text = _single_text(outputs) if isinstance(data, str | bytes) else None
    if text is None:
        tensors = [tensor_of(output.name, output.datatype, output.array) for output in outputs]
        return Message(data=tensors, status=OK)
    if isinstance(data, str):
        try:
            return Message(data=text.decode(), status=OK)
        except UnicodeDecodeError:
            pass  # Not text, so it is sent as bytes.
    return Message(data=text, status=OK)


def _single_text(outputs: list[OutputTensor]) -> bytes | None:
    if len(outputs) == 1 and outputs[0].datatype == "BYTES" and outputs[0].array.size == 1:
        return bytes_elements(outputs[0].array)[0]
    return None
