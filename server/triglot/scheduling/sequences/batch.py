"""A batch of requests of different sequences, each in a row of its own.

The server adds control inputs to it: START, READY, END and the sequence's id, CORRID (spec 5.2).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.call import BatchCall, Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Internal, InvalidArgument, own_copy
from triglot.core.tensor import DATATYPES, Array, datatype_of
from triglot.executors.batch import BatchTimes, check_answers
from triglot.executors.executor import Runnable
from triglot.executors.hosted import HostedModel
from triglot.executors.joining import split
from triglot.executors.work import Explain, Function, Inputs
from triglot.model.model import Model
from triglot.model.scheduling import ControlInput
from triglot.model.signature import shape_text
from triglot.scheduling.sequences.request import SequenceRequest
from triglot.scheduling.sequences.states import StateTensors, joined
from triglot.scheduling.sequences.strategies import Rows


class ControlTensors:
    """Makes control inputs of shape [rows,1] for models with a batch dim, and [1] for others."""

    def __init__(self, controls: Iterable[ControlInput], *, batched: bool) -> None:
        self._controls = tuple(controls)
        self._batched = batched

    @property
    def takes_texts(self) -> bool:
        """Whether sequence ids are strings, as the model's CORRID input is of type BYTES."""
        return any(control.kind == "CORRID" and control.datatype == "BYTES" for control in self._controls)

    def check(self, sequence_id: int | str) -> None:
        """Raise `InvalidArgument` for a sequence id that the model's CORRID input cannot hold."""
        for control in self._controls:
            if control.kind == "CORRID" and not _fits(sequence_id, control.datatype):
                kind = "a string" if control.datatype == "BYTES" else f"an integer of type {control.datatype}"
                raise InvalidArgument(
                    f"sequence id {sequence_id!r}: expected {kind}, the type of the model's input '{control.name}'"
                )

    def inputs(self, rows: Sequence[SequenceRequest | None]) -> dict[str, Array]:
        """Return the control inputs of these rows; None is a row without a request."""
        made = {}
        for control in self._controls:
            values = [_value(control, row) for row in rows]
            array = np.array(values, DATATYPES[control.datatype].dtype)
            made[control.name] = array.reshape(-1, 1) if self._batched else array
        return made

    def of_one_request(self, rows: int) -> dict[str, Array]:
        """Return the control inputs of `rows` sequences of one request each."""
        made = {}
        for control in self._controls:
            text = control.datatype == "BYTES"
            ids: list[Any] = [str(number).encode() if text else number for number in range(1, rows + 1)]
            values = ids if control.kind == "CORRID" else [control.true] * rows
            array = np.array(values, DATATYPES[control.datatype].dtype)
            made[control.name] = array.reshape(-1, 1) if self._batched else array
        return made


def _fits(sequence_id: int | str, datatype: str) -> bool:
    if datatype == "BYTES" or isinstance(sequence_id, str):
        return datatype == "BYTES" and isinstance(sequence_id, str)
    return sequence_id <= int(np.iinfo(DATATYPES[datatype].dtype).max)


def _value(control: ControlInput, row: SequenceRequest | None) -> Any:
    if control.kind == "CORRID":
        if row is None:
            return b"" if control.datatype == "BYTES" else 0
        sequence_id = row.scheduling.sequence_id
        return sequence_id.encode() if isinstance(sequence_id, str) else sequence_id
    if row is None:
        return control.false
    holds = {"START": row.start, "READY": True, "END": row.end}[control.kind]
    return control.true if holds else control.false


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequenceTensors:
    """The inputs that the server adds to those of the client, and how batches are passed to the model.

    `batched`: the model has a batch dim. `decoupled`: it yields responses, to one request at a time.
    `infer_batch`: the function that takes requests as a list, if any. `hosted`: see `stacked`.
    """

    controls: ControlTensors
    states: StateTensors
    batched: bool
    decoupled: bool
    infer_batch: Callable[..., Any] | None = None
    hosted: bool = False

    @classmethod
    def of(cls, model: Model) -> SequenceTensors:
        """Return the tensors of a model.

        Raise `ValueError` for options that a model with sequences cannot have.
        """
        batching = model.sequence_batching
        if batching is None:
            raise ValueError("sequence_batching: expected a SequenceBatching, got None")
        if model.takes_messages:
            raise ValueError("sequence_batching: expected a model with tensor inputs, got one that takes messages")
        batched, decoupled = model.max_batch_size > 0, inspect.isgeneratorfunction(model.infer)
        if batching.states and decoupled:
            raise ValueError("sequence_batching.states: expected none for a model that yields responses")
        controls = ControlTensors(batching.controls, batched=batched)
        states = StateTensors(batching.states, batched=batched)
        return cls(controls, states, batched, decoupled, model.infer_batch, isinstance(model, HostedModel))

    def check(self, inputs: Inputs, sequence_id: int | str, model: str) -> None:
        """Raise `InvalidArgument` for a request that cannot be in a sequence of this model."""
        if self.batched and any(array.shape[:1] not in ((), (1,)) for array in inputs.values()):
            raise InvalidArgument(
                f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher, got {max(array.shape[0] for array in inputs.values() if array.shape)}"
            )
        self.controls.check(sequence_id)

    def key(self, request: SequenceRequest) -> object:
        """Return a value that is equal for requests that can share a batch."""
        return request.shapes, self.states.shapes(request.run.states)

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the model's inputs for these rows, at least one of which has a request."""
        first = next(row for row in rows if row is not None)
        if len(rows) == 1:
            clients: dict[str, Any] = dict(first.inputs)
        else:
            clients = {
                name: joined([None if row is None else row.inputs[name] for row in rows], hosted=self.hosted)
                for name in first.inputs
            }
        return {**clients, **self.controls.inputs(rows), **self.states.inputs(rows, hosted=self.hosted)}

    def completed(self, inputs: Inputs) -> Inputs:
        """Return inputs completed for sequences of one request each; controls and states that are given are kept.

        Raise `InvalidArgument` if given ones have another datatype or shape than the model's.
        """
        sizes = [array.shape[0] for array in inputs.values() if array.shape]
        rows = sizes[0] if self.batched and sizes else 1
        own = {**self.controls.of_one_request(rows), **self.states.of_one_request(rows)}
        for name in own.keys() & inputs.keys():
            expected, got = own[name], inputs[name]
            if (got.dtype, got.shape) != (expected.dtype, expected.shape):
                raise InvalidArgument(
                    f"input '{name}': expected {datatype_of(expected)} of shape {shape_text(expected.shape)}, got "
                    f"{datatype_of(got)} of shape {shape_text(got.shape)}"
                )
        return {**own, **inputs}

    @property
    def own_names(self) -> Collection[str]:
        """Names of the inputs that the server adds."""
        return {**self.controls.of_one_request(1), **self.states.of_one_request(1)}.keys()


class SequenceBatch(Runnable):
    """A batch that an instance executes.

    `on_end` is called on the event loop, and the schedule then calls `report`.
    """

    def __init__(
        self,
        tensors: SequenceTensors,
        rows: Rows,
        on_end: Callable[[SequenceBatch], None],
    ) -> None:
        self.members = [row for row in rows if row is not None]
        self._tensors = tensors
        self._rows = rows
        self._on_end = on_end
        self._times = BatchTimes()
        self.over = False
        """True once it has been executed. On the event loop."""
        self.bind: Callable[[], object] = _bind_nothing
        """Called on the instance's thread; see `HostedModel.runs_on`."""

    def run(self, function: Function, explain: Explain) -> None:
        """Execute the batch. On the instance's thread."""
        self.bind()
        if len(self._rows) == 1:
            self._run_unbatched(self.members[0], function, explain)
        else:
            self._run_together(function, explain)

    def _run_unbatched(self, request: SequenceRequest, function: Function, explain: Explain) -> None:
        def run_model(_: Inputs, call: Call) -> Any:
            request.executed = True
            answer = function(self._tensors.inputs(self._rows), call)
            if self._tensors.states:
                self._keep(answer)
            return answer

        request.work.run(run_model, explain)

    def _run_together(self, function: Function, explain: Explain) -> None:
        calls = [member.work.call for member in self.members]
        for member, call in zip(self.members, calls, strict=True):
            call.execution_started(member.arrived, len(calls))
            member.executed = True
        times = self._times
        times.begin(calls)
        with RunningFor(calls):
            try:
                if self._tensors.infer_batch is None:
                    self._run_joined(function, calls)
                else:
                    self._run_listed(self._tensors.infer_batch, calls, explain)
            except BaseException as error:  # A model that calls exit() fails these calls, not the server.
                failure = explain(error)
                for member in self.members:
                    member.set_error(own_copy(failure))
        times.end()
        for call in calls:
            call.execution_ended(times.joining, times.splitting)

    def _run_joined(self, function: Function, calls: Sequence[Call]) -> None:
        inputs = self._tensors.inputs(self._rows)
        self._times.joined()
        answer = function(inputs, BatchCall(calls) if len(calls) > 1 else calls[0])
        self._times.answered()
        del inputs  # Their memory is free for the next batch, unless the model kept them.
        parts = self._split(answer)
        self._keep(answer)
        for row, part in zip(self._rows, parts, strict=True):
            if row is not None:
                row.respond(part)

    def _run_listed(self, infer_batch: Callable[..., Any], calls: Sequence[Call], explain: Explain) -> None:
        """Pass the requests as a list; rows without a request are skipped."""
        inputs = [self._tensors.inputs((member,)) for member in self.members]
        self._times.joined()
        answers = infer_batch(inputs, calls)
        self._times.answered()
        for member, answer in zip(self.members, check_answers(answers, len(calls)), strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                self._keep(answer, (member,))
                member.respond(answer)
            except Exception as error:
                member.set_error(own_copy(explain(error)))

    def _keep(self, answer: object, rows: Rows | None = None) -> None:
        with _log_errors():
            self._tensors.states.keep(answer, self._rows if rows is None else rows)

    def _split(self, answer: object) -> list[dict[str, Array]]:
        with _log_errors():
            return split(answer, [1] * len(self._rows), len(self._rows))

    def deliver(self) -> None:
        """See `Runnable`."""
        self.over = True
        self._on_end(self)

    def report(self) -> None:
        """Deliver the outcome of each request. On the event loop."""
        if self._times.end_time:
            self._times.count([member.work for member in self.members])
        for member in self.members:
            member.work.deliver()


@contextmanager
def _log_errors() -> Iterator[None]:
    """Log errors in what a model returned, for the model's author."""
    try:
        yield
    except Internal as error:
        log.error("%s", error.message)
        raise


def _bind_nothing() -> None:
    """For models that run in the server's process: nothing to bind."""
