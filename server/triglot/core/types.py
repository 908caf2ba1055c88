"""The values that travel between the layers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.tensor import DATATYPES, Array, Buffer

ParameterValue = bool | int | float | str
InputParameters = Mapping[str, Mapping[str, ParameterValue]]
"""Parameters of single inputs, by the input's name."""
NO_INPUT_PARAMETERS: InputParameters = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named input or output of a model.

    `shape` is what the model's array looks like; -1 stands for any size, None for any rank. With
    `max_batch_size` > 0 the first dim is the batch and must be -1. An `optional` input may be left out of a
    request: `infer` is then given none.

    Raises `ValueError` for an unknown datatype or a dim below -1.
    """

    name: str
    datatype: str
    shape: Sequence[int] | None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES:
            raise ValueError(f"{self.name}: datatype {self.datatype!r} is none of {', '.join(DATATYPES)}")
        if self.shape is None:
            return
        try:
            object.__setattr__(self, "shape", tuple(operator.index(dim) for dim in self.shape))
        except TypeError:
            raise ValueError(
                f"{self.name}: shape: expected a list of integers or None, got {self.shape!r}"
            ) from None
        if any(dim < -1 for dim in self.shape):
            raise ValueError(f"{self.name}: a dim of shape {list(self.shape)} is below -1")


@dataclass(slots=True)
class InputTensor:
    """A tensor as it came: `data` is raw little-endian bytes, or a flat array of its elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | Array


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`size` bytes at `offset` of a region of shared memory that a client has registered."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class OutputWish:
    """An output is wanted as its `classes` highest values, as texts, or bytes in a `region`; 0, None: neither."""

    classes: int = 0
    region: RegionSlice | None = None


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Where inputs are, by their place in the request, and what becomes of outputs, by name (spec 2.6)."""

    inputs: Mapping[int, RegionSlice]
    outputs: Mapping[str, OutputWish]


@dataclass(slots=True)
class InferenceRequest:
    """One request for one model, in no protocol's terms. An empty version or signature means the default one.

    `lenient_shapes`: the model gets the inputs in whatever shapes they have, as in TensorFlow Serving (tfs 0.9).
    `options`: of single tensors, where there are any; inputs in a region have no data before it is read.
    `input_parameters`: the inputs' own parameters, where there are any that mean nothing to the server.
    `method`: what the answer is made of the outputs for, as of signatures: predict, classify or regress.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    inputs: list[InputTensor] = field(default_factory=list)
    outputs: Sequence[str] = ()
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    signature_name: str = ""
    lenient_shapes: bool = False
    options: TensorOptions | None = None
    input_parameters: InputParameters | None = None
    method: str = "predict"


@dataclass(slots=True)
class OutputTensor:
    """An output; `datatype` is the signature's. BYTES may be an array of objects or of numpy's text dtypes."""

    name: str
    datatype: str
    array: Array


class Answer(dict[str, Any]):
    """What a model may answer with in place of a plain dict: outputs by name, and `parameters` of the response.

    `final`: a decoupled model says with it that no further answer follows. `partial`: outputs may be missing.
    """

    __slots__ = ("final", "parameters", "partial")

    def __init__(
        self,
        outputs: Mapping[str, Any],
        parameters: Mapping[str, ParameterValue] = MappingProxyType({}),
        *,
        final: bool = False,
        partial: bool = False,
    ) -> None:
        super().__init__(outputs)
        self.parameters = parameters
        self.final = final
        self.partial = partial


@dataclass(slots=True)
class InferenceResponse:
    """What one execution gave.

    `final`: its model says that no further answer follows. `placed`: the outputs that are in a region of shared
    memory already, and leave without their data. `typed`: elements are wanted in typed fields, where the protocol
    has such. `answer`: what a model on a thread returned; while it is here, counts of references tell who else has
    its arrays.
    """

    model_name: str
    model_version: str
    id: str
    outputs: list[OutputTensor]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    final: bool = False
    placed: frozenset[str] = frozenset()
    typed: bool = False
    answer: object = None


class HttpChunk(bytes):
    """An answer of a stream that goes over HTTP as it is."""


@dataclass(slots=True)
class Exchange:
    """A grps call, for a model that takes whole messages (`Model.takes_messages`).

    `message` is a serialized GrpsMessage. The model answers with one; when `streaming`, it gives any number of
    them to `Call.respond` instead, and `HttpChunk`s in customised HTTP. `http` is the request of customised HTTP,
    in which `message` is empty, and `http_response` is where the model leaves its answer (grps 3.6).
    """

    message: bytes
    streaming: bool = False
    http: HttpRequest | None = None
    http_response: HttpResponse | None = None
