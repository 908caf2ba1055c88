"""`InferenceRequest`: one that a model is to answer, or one that it makes of another model."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from triglot.backends.triton_python import calls
from triglot.backends.triton_python.errors import TritonModelException
from triglot.backends.triton_python.home import Home
from triglot.backends.triton_python.parameters import NO_PARAMETERS, as_json, checked
from triglot.backends.triton_python.response import InferenceResponse
from triglot.backends.triton_python.sender import InferenceResponseSender, Line
from triglot.backends.triton_python.tensor import Tensor
from triglot.backends.triton_python.texts import text
from triglot.core.call import Call, ModelCall
from triglot.core.request_scheduling import own_parameters
from triglot.core.tensor import Array
from triglot.core.types import ParameterValue
from triglot.model.scheduling import SequenceBatching

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(enum.IntEnum):
    """Where a tensor may be."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.CPU
TRITONSERVER_MEMORY_CPU_PINNED = MemoryType.CPU_PINNED
TRITONSERVER_MEMORY_GPU = MemoryType.GPU


@dataclass(frozen=True, slots=True)
class PreferredMemory:
    """Where the tensors of an answer are wanted; they are in the CPU's memory in any case."""

    preferred_memory_type: MemoryType
    preferred_device_id: int = 0


class InferenceTrace:
    """The trace of a request."""

    __slots__ = ("_context",)

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """What a tracer goes on with, `traceparent` and `tracestate`, as JSON; None where the call has none."""
        return self._context


class InferenceRequest:
    """A request. `model_version` -1: the one that serves. Names and id are `str` or `bytes`.

    Raises `TypeError` for inputs that are no `Tensor`s, and for names of other types.
    """

    home: ClassVar[Home | None] = None
    """The model whose code makes requests of this class; None: the one whose code runs."""

    __slots__ = (
        "_batching",
        "_call",
        "_correlation_id",
        "_flags",
        "_id",
        "_inputs",
        "_line",
        "_model",
        "_outputs",
        "_parameters",
        "_priority",
        "_timeout",
        "_trace",
        "_version",
    )

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] = (),
        requested_output_names: Sequence[str | bytes] = (),
        model_name: str | bytes = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        priority: int = 0,
    ) -> None:
        self._inputs = {tensor.name(): tensor for tensor in _tensors(inputs)}
        self._outputs = [text(name, "InferenceRequest: requested_output_names") for name in requested_output_names]
        self._model, self._version = text(model_name, "InferenceRequest: model_name"), int(model_version)
        self._id, self._correlation_id = text(request_id, "InferenceRequest: request_id"), correlation_id
        self._flags, self._timeout, self._priority = flags, timeout, priority
        self._parameters = checked(parameters)
        self._trace = trace
        self._call: Call | None = None
        self._line: Line | None = None
        self._batching: SequenceBatching | None = None

    def receive(
        self,
        inputs: Mapping[str, Array],
        call: Call,
        line: Line,
        outputs: Sequence[str],
        batching: SequenceBatching | None = None,
    ) -> None:
        """Make it one that the model is to answer; all `outputs` are wanted where the call names none.

        `batching`: the model's, where its requests may come again.
        """
        said = call.scheduling
        self._inputs = {name: Tensor.of(name, array) for name, array in inputs.items()}
        self._outputs = list(call.requested_outputs or outputs)
        self._model, self._version = call.model_name, call.model_version
        self._id, self._correlation_id = call.request_id, said.sequence_id
        self._flags = (TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if said.sequence_start else 0) | (
            TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if said.sequence_end else 0
        )
        self._timeout, self._priority = round(said.timeout * 1e6), said.priority
        self._parameters = own_parameters(call.parameters) if call.parameters else NO_PARAMETERS
        self._call, self._line, self._batching = call, line, batching

    # --- what it says ---

    def inputs(self) -> list[Tensor]:
        """Its tensors."""
        return list(self._inputs.values())

    def input(self, name: str) -> Tensor | None:
        """The tensor of that name."""
        return self._inputs.get(name)

    def request_id(self) -> str:
        """What the client calls it; "" for nothing."""
        return self._id

    def correlation_id(self) -> int | str:
        """Its sequence; 0 for none."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """The outputs that are wanted."""
        return list(self._outputs)

    def model_name(self) -> str:
        """The model that it is for."""
        return self._model

    def model_version(self) -> int:
        """The version that it is for; -1: the one that serves."""
        return self._version

    def flags(self) -> int:
        """The sequence's flags."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Say whether it starts or ends its sequence."""
        self._flags = flags

    def timeout(self) -> int:
        """Microseconds that it may wait; 0: any time."""
        return self._timeout

    def priority(self) -> int:
        """Its level; 0: the model's default one."""
        return self._priority

    def parameters(self) -> str:
        """Its own parameters, as JSON."""
        return as_json(self._parameters)

    def trace(self) -> InferenceTrace:
        """Its trace."""
        if self._trace is None:
            self._trace = InferenceTrace(None if self._call is None else _context_of(self._call))
        return self._trace

    # --- one that the model answers ---

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._call is not None and self._call.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends its responses. Raises `TritonModelException` for a request that the model itself made."""
        if self._line is None:
            raise TritonModelException("get_response_sender: expected a request that was passed to execute")
        self._line.taken = True
        return InferenceResponseSender(self._line)

    def set_release_flags(self, flags: int) -> None:
        """With TRITONSERVER_REQUEST_RELEASE_RESCHEDULE the request comes again when `execute` has returned.

        Raises `TritonModelException` for other flags than that and TRITONSERVER_REQUEST_RELEASE_ALL, and where the
        model's sequences are not iterative.
        """
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags: expected ..._ALL or ..._RESCHEDULE, got {flags!r}")
        if self._line is None or (flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and self._batching is None):
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which only models with "
                "sequence_batching.iterative_sequence may use"
            )
        self._line.again = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def come_again(self) -> None:
        """It was released to be executed once more: its sequence has started by now."""
        assert self._line is not None
        assert self._batching is not None
        self._line.again = False
        self._flags &= ~TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        for control in self._batching.controls:
            if control.kind == "START" and (tensor := self._inputs.get(control.name)) is not None:
                self._inputs[control.name] = Tensor.of(control.name, np.full_like(tensor.array, control.false))

    # --- one that it makes ---

    def _wanted(self, *, stream: bool) -> ModelCall:
        if not self._model:
            raise TritonModelException("InferenceRequest: model_name: expected the model to call, got ''")
        # The sequence of the request that it works for is not the other model's.
        parameters = {**self._parameters, "sequence_id": self._correlation_id}
        if self._correlation_id:
            parameters["sequence_start"] = bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            parameters["sequence_end"] = bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        if self._timeout:
            parameters["timeout"] = self._timeout
        if self._priority:
            parameters["priority"] = self._priority
        return ModelCall(
            self._model,
            {name: tensor.array for name, tensor in self._inputs.items()},
            str(self._version) if self._version > 0 else "",
            tuple(self._outputs),
            parameters=parameters,
            stream=stream,
            request_id=self._id,
        )

    def exec(self, decoupled: bool = False) -> Any:
        """What the other model answers: an `InferenceResponse`, which may have an error; of a `decoupled` one an
        iterator over them."""
        return calls.run(self.home, self._wanted(stream=decoupled))

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, to be awaited in an `async def execute`."""
        return calls.start(self.home, self._wanted(stream=decoupled))


def _context_of(call: Call) -> str | None:
    if not (traceparent := call.traceparent):
        return None
    state = {"tracestate": state} if (state := call.tracestate) else {}
    return json.dumps({"traceparent": traceparent, **state})


def _tensors(inputs: Iterable[Tensor]) -> list[Tensor]:
    tensors = list(inputs)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"InferenceRequest: inputs: expected Tensors, got {type(tensor).__name__}")
    return tensors


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name; None where the request has none."""
    return inference_request.input(name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name; None where the response has none."""
    return next((one for one in inference_response.output_tensors() if one.name() == name), None)
