"""Values that pass between the layers: tensors, requests and responses, independent of any protocol."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from triglot.core.compiling import mypyc_attr
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.tensor import DATATYPES, Array, Buffer, MessageBytes

ParameterValue = bool | int | float | str
TensorParameters = Mapping[str, Mapping[str, ParameterValue]]
"""Parameters of single inputs, or of single outputs, by name."""
NO_TENSOR_PARAMETERS: Final[TensorParameters] = MappingProxyType({})


@mypyc_attr(native_class=False)
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named input or output of a model.

    `shape` is the shape of the model's array; -1 stands for any size, None for any rank. With `max_batch_size` > 0
    the first dim is the batch and must be -1. A request may omit an `optional` input; `infer` then does not get
    it.

    Raise `ValueError` for a name that is not Unicode text, an unknown datatype or a dim below -1.
    """

    name: str
    datatype: str
    shape: Sequence[int] | None
    optional: bool = False

    def __post_init__(self) -> None:
        given: Any = self  # What a model's author passes may be of other types.
        if not is_unicode(given.name):
            raise ValueError(f"the name of a tensor: expected Unicode text, got {given.name!r}")
        if given.datatype not in DATATYPES:
            raise ValueError(f"{self.name}: datatype {given.datatype!r} is none of {', '.join(DATATYPES)}")
        if given.shape is None:
            return
        try:
            shape = tuple(operator.index(dim) for dim in given.shape)
        except TypeError:
            raise ValueError(
                f"{self.name}: shape: expected a list of integers or None, got {given.shape!r}"
            ) from None
        if any(dim < -1 for dim in shape):
            raise ValueError(f"{self.name}: a dim of shape {list(shape)} is below -1")
        object.__setattr__(self, "shape", shape)


def is_unicode(value: object) -> bool:
    """Return whether this is a text that UTF-8 can encode, which excludes lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class InputTensor:
    """An input tensor as received: `data` is raw little-endian bytes, or a flat array of the elements."""

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...], data: Buffer | Array) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data


def owned(tensor: InputTensor) -> InputTensor:
    """Return the tensor with bytes that no other code can change."""
    if not isinstance(tensor.data, Buffer):
        return tensor
    return InputTensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`size` bytes at `offset` of a registered shared-memory region."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of a requested output.

    `classes`: how many of its highest values are wanted, in text form; 0: the tensor. `region`: where it is to be
    written in shared memory; None: into the response.
    """

    classes: int = 0
    region: RegionSlice | None = None


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Shared-memory regions of inputs, by position in the request, and options of outputs, by name (spec 2.6)."""

    inputs: Mapping[int, RegionSlice]
    outputs: Mapping[str, OutputOptions]


class InferenceRequest:
    """One request for one model, independent of the protocol. An empty version or signature means the default one.

    `lenient_shapes`: the model gets inputs of any shape, as in TensorFlow Serving (tfs 0.9). `options`: those of
    single tensors, if any; inputs in shared memory have no data until it is read. `input_parameters` and
    `output_parameters`: the parameters of single inputs and of single requested outputs that the server does not
    interpret, if any. `method` is the signature method by which the response is formed: predict, classify or
    regress.
    """

    __slots__ = (
        "id",
        "input_parameters",
        "inputs",
        "lenient_shapes",
        "method",
        "model_name",
        "model_version",
        "options",
        "output_parameters",
        "outputs",
        "parameters",
        "signature_name",
    )

    def __init__(
        self,
        model_name: str,
        model_version: str = "",
        id: str = "",  # noqa: A002 - the protocols' own name.
        inputs: list[InputTensor] | None = None,
        outputs: Sequence[str] = (),
        parameters: dict[str, ParameterValue] | None = None,
        signature_name: str = "",
        lenient_shapes: bool = False,
        options: TensorOptions | None = None,
        input_parameters: TensorParameters | None = None,
        method: str = "predict",
        output_parameters: TensorParameters | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs: list[InputTensor] = [] if inputs is None else inputs
        self.outputs = outputs
        self.parameters: dict[str, ParameterValue] = {} if parameters is None else parameters
        self.signature_name = signature_name
        self.lenient_shapes = lenient_shapes
        self.options = options
        self.input_parameters = input_parameters
        self.method = method
        self.output_parameters = output_parameters


class OutputTensor:
    """An output; `datatype` is the signature's. BYTES may be an object array or one of numpy's text dtypes.

    `parameters` are pairs of names and values.
    """

    __slots__ = ("array", "datatype", "name", "parameters")

    def __init__(
        self, name: str, datatype: str, array: Array, parameters: tuple[tuple[str, ParameterValue], ...] = ()
    ) -> None:
        self.name = name
        self.datatype = datatype
        self.array = array
        self.parameters = parameters


@mypyc_attr(native_class=False)
class Answer(dict[str, Any]):
    """A model's response with more than a dict can say: outputs by name, and `parameters` of the response.

    `output_parameters`: those of single outputs, which KServe V2 sends. `final`: no further response follows, for
    decoupled models. `partial`: outputs may be missing.
    """

    __slots__ = ("final", "output_parameters", "parameters", "partial")

    def __init__(
        self,
        outputs: Mapping[str, Any],
        parameters: Mapping[str, ParameterValue] = MappingProxyType({}),
        *,
        final: bool = False,
        partial: bool = False,
        output_parameters: TensorParameters = NO_TENSOR_PARAMETERS,
    ) -> None:
        super().__init__(outputs)
        self.parameters = parameters
        self.output_parameters = output_parameters
        self.final = final
        self.partial = partial


class InferenceResponse:
    """The response of one execution.

    `final`: no further response follows. `placed`: names of the outputs that were written to shared memory, and
    are sent without data. `typed`: elements go into typed fields, where the protocol has them. `answer`: the
    object that a model on a thread returned; while it is referenced here, reference counts tell who else has its
    arrays.
    """

    __slots__ = (
        "answer",
        "final",
        "id",
        "model_name",
        "model_version",
        "outputs",
        "parameters",
        "placed",
        "typed",
    )

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,  # noqa: A002 - the protocols' own name.
        outputs: list[OutputTensor],
        parameters: dict[str, ParameterValue] | None = None,
        final: bool = False,
        placed: frozenset[str] = frozenset(),
        typed: bool = False,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.parameters: dict[str, ParameterValue] = {} if parameters is None else parameters
        self.final = final
        self.placed = placed
        self.typed = typed
        self.answer: object = None


@mypyc_attr(native_class=False)
class HttpChunk(bytes):
    """A response of an HTTP stream that is sent unchanged."""


@dataclass(slots=True)
class Exchange:
    """A grps call, for a model that takes whole messages (`Model.takes_messages`).

    `message` is a serialized GrpsMessage. The model returns one; when `streaming`, it passes any number of them
    to `Call.respond` instead, or `HttpChunk`s in customised HTTP. `http` is the request of customised HTTP, where
    `message` is empty, and `http_response` is where the model puts its response (grps 3.6).
    """

    message: MessageBytes
    streaming: bool = False
    http: HttpRequest | None = None
    http_response: HttpResponse | None = None
