"""One model of a grps project, or its whole DAG, as a `Model` of the server.

Calls through tensor protocols become messages, and messages become tensors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import copy
from typing import Any

import numpy as np

from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.gtensors import fill, to_array
from triglot.backends.grps.messages import NOT_A_MESSAGE, as_own_class, is_message, parse
from triglot.backends.grps.runner import Failures, ModelRunner, Pool, run_in_sequence
from triglot.backends.grps.settings import Batching
from triglot.core.call import Call
from triglot.core.errors import Code, Internal, InvalidArgument, ServingError
from triglot.core.tensor import Array, object_array
from triglot.model.model import Model
from triglot.model.scheduling import DynamicBatching
from triglot.pb.grps.grps_pb2 import GrpsMessage

log = logging.getLogger(__name__)


class GrpsModel(Model):
    """Receives grps' messages as they were sent; for tensor protocols it makes messages with `gtensors`.

    `model_id` is the "name-version" that such messages carry, "" for the DAG.
    """

    platform = "grps"
    takes_messages = True
    any_tensors = True
    max_queue_size = sys.maxsize  # The queue of requests beyond max_concurrency is unlimited (grps 5.1).

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        model_id: str,
        description: Mapping[str, Any],
        pool: Pool,
        failures: Failures,
        release: Callable[[], None],
    ) -> None:
        self.description = description
        self.instances = pool.size
        self._runners = runners
        self._model_id = model_id
        self._pool = pool
        self._failures = failures
        self._release = release

    def infer(self, inputs: Mapping[str, Array], call: Call) -> Any:
        """Run the models on the bytes of a GrpsMessage in a grps call, on arrays by name in any other call.

        Return None if the response has been set otherwise: streamed, or for customised HTTP in
        `call.exchange.http_response`. Raise a `ServingError` of code INTERNAL for errors that the project's code
        raises or reports, and `InvalidArgument` for a malformed message.
        """
        with self._pool.slots([call]) as [skipped]:
            if skipped is not None:
                raise skipped
            message = self._message(inputs, call)
            context = GrpsContext.of(call)
            with closing(context):
                answer = self._run(message, context)
            return self._answer(answer, context, call)

    def _message(self, inputs: Mapping[str, Array], call: Call) -> Any:
        exchange = call.exchange
        return message_of(inputs, self._model_id) if exchange is None else parse(exchange.message)

    def _answer(self, answer: Any, context: GrpsContext, call: Call) -> Any:
        """Return the response to the call. Raise as `infer` does."""
        exchange = call.exchange
        if context.has_err():
            log.error(
                "%s: the project's code set an error: %s", self._model_id or "the DAG", context.get_err_msg()
            )
        if exchange is not None and exchange.http is not None:
            exchange.http_response = context.response
            call.outcome = _outcome(context)
            return None
        if context.finished:
            return None
        if context.has_err():
            raise Internal(str(context.get_err_msg()))
        if exchange is not None and exchange.streaming:
            return None
        if not is_message(answer):
            raise Internal(NOT_A_MESSAGE)
        return answer.SerializeToString() if exchange is not None else arrays_of(as_own_class(answer))

    def _run(self, message: Any, context: GrpsContext) -> Any:
        try:
            return run_in_sequence(self._runners, message, context)
        except BaseException as error:  # Includes SystemExit: it fails this request, not the server.
            failure = self._failures.explain(error)
            if context.finished:  # The stream is complete, so the error cannot be sent.
                return None
            try:
                raise failure from None
            finally:
                del failure  # Its traceback refers to this frame.

    def close(self) -> None:
        """Releases its part of the project."""
        self._runners = ()
        self._release()


class BatchedGrpsModel(GrpsModel):
    """A single model of a project with batching: the server passes it the requests of a batch (grps 6.5).

    Inside a DAG of several models, batches are formed by `DynamicBatcher` instead.
    """

    def __init__(self, runner: ModelRunner, batching: Batching, *arguments: Any) -> None:
        super().__init__([runner], *arguments)
        size, delay = batching.max_batch_size, batching.timeout_us / 1e6
        self.dynamic_batching = DynamicBatching(max_batch_size=size, max_queue_delay=delay)

    def infer(self, inputs: Mapping[str, Array], call: Call) -> Any:
        """Run a batch of one."""
        [answer] = self.infer_batch([inputs], [call])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def infer_batch(self, inputs: Sequence[Mapping[str, Array]], calls: Sequence[Call]) -> list[Any]:
        """As `infer`, for several calls: returns the response or error of each."""
        with self._pool.slots(calls) as skipped, ExitStack() as stack:
            answers: list[Any] = list(skipped)
            messages: dict[int, Any] = {}
            contexts: dict[int, GrpsContext] = {}
            for at in [at for at, reason in enumerate(skipped) if reason is None]:
                try:
                    messages[at] = self._message(inputs[at], calls[at])
                    contexts[at] = stack.enter_context(closing(GrpsContext.of(calls[at])))
                except Exception as error:  # It does not affect the other calls.
                    answers[at] = error.with_traceback(None)  # The frames refer to `answers`.
            outputs = (
                self._run_batch([messages[at] for at in contexts], list(contexts.values())) if contexts else []
            )
            for (at, context), output in zip(contexts.items(), outputs, strict=True):
                try:
                    failed = isinstance(output, ServingError)
                    answers[at] = output if failed else self._answer(output, context, calls[at])
                except Exception as error:
                    answers[at] = error.with_traceback(None)
            return answers

    def _run_batch(self, messages: list[Any], contexts: list[GrpsContext]) -> list[Any]:
        """Return the model's output for each message, or the error of the whole batch for each."""
        try:
            return self._runners[0].run_batch(messages, contexts)
        except BaseException as error:
            failure = self._failures.explain(error)
            # Each request gets its own copy of the exception.
            return [None if context.finished else copy(failure) for context in contexts]


def _outcome(context: GrpsContext) -> Code:
    """Return the outcome of customised HTTP: from its status, or an error of the context (grps 10.11)."""
    status = 200 if context.response is None else context.response.status
    if 400 <= status < 500:
        return Code.INVALID_ARGUMENT
    return Code.INTERNAL if status >= 500 or context.has_err() else Code.OK


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
