"""`InferenceRequest`: a request to a model, or one that a model makes to another model."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from triglot.backends.triton_python import calls
from triglot.backends.triton_python.context import ModelContext
from triglot.backends.triton_python.errors import TritonModelException, text
from triglot.backends.triton_python.response import NO_PARAMETERS, InferenceResponse, as_json, checked
from triglot.backends.triton_python.sender import InferenceResponseSender, ResponseChannel
from triglot.backends.triton_python.tensor import Tensor
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
    """The kinds of memory for tensors."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.CPU
TRITONSERVER_MEMORY_CPU_PINNED = MemoryType.CPU_PINNED
TRITONSERVER_MEMORY_GPU = MemoryType.GPU


@dataclass(frozen=True, slots=True)
class PreferredMemory:
    """The preferred memory of response tensors; has no effect, as they are always in CPU memory."""

    preferred_memory_type: MemoryType
    preferred_device_id: int = 0


class InferenceTrace:
    """The trace context of a request."""

    __slots__ = ("_context",)

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Return `traceparent` and `tracestate` as JSON, to continue the trace; None if the call has none."""
        return self._context


class InferenceRequest:
    """A request. `model_version` -1 is the default version. Names and id are `str` or `bytes`.

    Raise `TypeError` for inputs that are not `Tensor`s, and for names of other types, and `TritonModelException`
    for two inputs of one name.
    """

    context: ClassVar[ModelContext | None] = None
    """The model whose code makes requests of this class; None: the running one."""

    __slots__ = (
        "_batching",
        "_call",
        "_channel",
        "_correlation_id",
        "_flags",
        "_id",
        "_inputs",
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
        self._channel: ResponseChannel | None = None
        self._batching: SequenceBatching | None = None

    def receive(
        self,
        inputs: Mapping[str, Array],
        call: Call,
        channel: ResponseChannel,
        outputs: Sequence[str],
        batching: SequenceBatching | None = None,
    ) -> None:
        """Initialize a request to the model; if the call names no outputs, all `outputs` are requested.

        `batching`: the model's, if its requests may be rescheduled.
        """
        scheduling = call.scheduling
        self._inputs = {name: Tensor.of(name, array) for name, array in inputs.items()}
        self._outputs = list(call.requested_outputs or outputs)
        self._model, self._version = call.model_name, call.model_version
        self._id, self._correlation_id = call.request_id, scheduling.sequence_id
        self._flags = (TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if scheduling.sequence_start else 0) | (
            TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if scheduling.sequence_end else 0
        )
        self._timeout, self._priority = round(scheduling.timeout * 1e6), scheduling.priority
        self._parameters = own_parameters(call.parameters) if call.parameters else NO_PARAMETERS
        self._call, self._channel, self._batching = call, channel, batching

    # --- properties ---

    def inputs(self) -> list[Tensor]:
        """Return its input tensors."""
        return list(self._inputs.values())

    def input(self, name: str) -> Tensor | None:
        """Return the input with that name, or None."""
        return self._inputs.get(name)

    def request_id(self) -> str:
        """Return the client's request id, or ""."""
        return self._id

    def correlation_id(self) -> int | str:
        """Return the id of its sequence; 0 for none."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """Return the requested outputs."""
        return list(self._outputs)

    def model_name(self) -> str:
        """Return the name of the requested model."""
        return self._model

    def model_version(self) -> int:
        """Return the requested version; -1: the default version."""
        return self._version

    def flags(self) -> int:
        """Return the sequence flags."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags for the start and end of its sequence."""
        self._flags = flags

    def timeout(self) -> int:
        """Return the queue timeout in microseconds; 0: none."""
        return self._timeout

    def priority(self) -> int:
        """Return the priority level; 0: the model's default."""
        return self._priority

    def parameters(self) -> str:
        """Return its parameters as JSON."""
        return as_json(self._parameters)

    def trace(self) -> InferenceTrace:
        """Return its trace."""
        if self._trace is None:
            self._trace = InferenceTrace(None if self._call is None else _context_of(self._call))
        return self._trace

    # --- a request to the model ---

    def is_cancelled(self) -> bool:
        """Whether the client cancelled the request, disconnected, or has not read too many responses."""
        return self._call is not None and self._call.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of its responses. Raise `TritonModelException` for a request made by the model."""
        if self._channel is None:
            raise TritonModelException("get_response_sender: expected a request that was passed to execute")
        self._channel.has_sender = True
        return InferenceResponseSender(self._channel)

    def set_release_flags(self, flags: int) -> None:
        """Set whether the request is released or, with ..._RESCHEDULE, executed again after `execute` returns.

        Raise `TritonModelException` for other flags than TRITONSERVER_REQUEST_RELEASE_ALL and ..._RESCHEDULE, and
        if the model's sequences are not iterative.
        """
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags: expected ..._ALL or ..._RESCHEDULE, got {flags!r}")
        if self._channel is None or (flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and self._batching is None):
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which only models with "
                "sequence_batching.iterative_sequence may use"
            )
        self._channel.rescheduled = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def reschedule(self) -> None:
        """Prepare the request for being executed again; the start of its sequence has passed."""
        assert self._channel is not None
        assert self._batching is not None
        self._channel.rescheduled = False
        self._flags &= ~TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        for control in self._batching.controls:
            if control.kind == "START" and (tensor := self._inputs.get(control.name)) is not None:
                self._inputs[control.name] = Tensor.of(control.name, np.full_like(tensor.array, control.false))

    # --- a request of the model to another one ---

    def _model_call(self, *, stream: bool) -> ModelCall:
        if not self._model:
            raise TritonModelException("InferenceRequest: model_name: expected the model to call, got ''")
        # The called model must not inherit the sequence of the request being executed.
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
        """Call the other model and return its `InferenceResponse`, which may have an error.

        Return an iterator of these for a `decoupled` model.
        """
        return calls.run(self.context, self._model_call(stream=decoupled))

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, awaitable, for an `async def execute`."""
        return calls.start(self.context, self._model_call(stream=decoupled))


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
    names = [tensor.name() for tensor in tensors]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise TritonModelException(f"InferenceRequest: input '{name}' already exists in request")
    return tensors


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input with that name, or None."""
    return inference_request.input(name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output with that name, or None."""
    return next(
        (output_tensor for output_tensor in inference_response.output_tensors() if output_tensor.name() == name),
        None,
    )
