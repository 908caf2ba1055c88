"""Calls that repeat others in everything but their tensors' values: run without decoding, checking or encoding.

Strategy: of a small message that is like an earlier one, all is known but the values: the version that it goes to,
the shapes and dtypes of its arrays, and what surrounds the values in the answer. The values are sliced out, the
model's arrays put between what surrounds them, and no coroutine waits. What is odd, an error or an answer of
another kind, goes on in the ordinary way, where all of that is made; so does every call where more is to be done
than to run the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy import ndarray

from triglot.binding import admit, response_of
from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.repeated import Reply
from triglot.core.scattered import SMALL_BYTES
from triglot.core.tensor import Array
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.core.validation import bind_inputs
from triglot.dataplane import DataPlane
from triglot.engine.servable import Servable
from triglot.engine.submission import Submission
from triglot.protocols.templates import Template, TemplateDecoder
from triglot.telemetry.observation import Observation

R = TypeVar("R")

MOST_LAYOUTS = 64
"""Shapes of answers to the same request that are remembered."""
Inputs = Sequence[tuple[str, np.dtype[Any], tuple[int, ...], slice]]
Around = Sequence[bytes]
"""What stands before the values of each output, and behind the last ones."""


def as_it_is(error: ServingError) -> ServingError:
    """The error of a protocol that adds nothing to it."""
    return error


@dataclass(frozen=True, slots=True)
class Ways(Generic[R]):
    """How a protocol has its requests run.

    `finder` gives what finds the version of requests like this one, and raises `ServingError`; `inference` the
    request as the data plane takes it. `around` gives what surrounds an answer's values, None where they are not
    in one piece each; `answer` what the ordinary way encodes. `worded` is the protocol's own form of an error.
    """

    finder: Callable[[R], Callable[[], Servable]]
    inference: Callable[[Servable, R], InferenceRequest]
    around: Callable[[InferenceResponse, InferenceRequest], Around | None]
    answer: Callable[[InferenceResponse, InferenceRequest], Any]
    worded: Callable[[ServingError], ServingError] = as_it_is


class Repeats(Generic[R]):
    """Finds what a message repeats, among those that `templates` has decoded. On the loop."""

    def __init__(self, dataplane: DataPlane, templates: TemplateDecoder[R], ways: Ways[R]) -> None:
        self._dataplane = dataplane
        self._templates = templates
        self._ways = ways

    def __call__(self, data: bytes) -> RequestPattern | None:
        """None: it goes the ordinary way."""
        template = self._templates.find(data)
        if template is None or self._dataplane.tracer.on:
            return None
        pattern: RequestPattern | None = template.pattern
        try:
            if pattern is None or pattern.find() is not pattern.version():
                pattern = self._learn(template, data)
        except ServingError:
            return None  # The ordinary way says why.
        return pattern if pattern is not None and pattern.runs else None

    def _learn(self, template: Template[R], data: bytes) -> RequestPattern | None:
        """Raises `ServingError`."""
        request = template.make(data)
        if request is None or template.tensors is None:
            return None
        find = self._ways.finder(request)
        servable = find()
        pattern = template.pattern = RequestPattern(self._dataplane, self._ways, find, servable)
        inference = self._ways.inference(servable, request)
        if _is_plain(servable, inference):
            pattern.learn_request(servable, inference, template.tensors)
        return pattern


def _is_plain(servable: Servable, request: InferenceRequest) -> bool:
    """Whether nothing is done for such a request but to run the model, whatever the values are."""
    signature = servable.signatures.get(request.signature_name or servable.default_signature)
    if signature is None or request.parameters or request.options is not None or request.id:
        return False
    if request.input_parameters is not None:
        return False
    if (
        servable.model.takes_messages
        or servable.decoupled
        or servable.sequences is not None
        or servable.answers is not None
    ):
        return False
    rules = signature.input_rules
    return (
        servable.takes_submissions
        and not signature.any_tensors
        and len(request.inputs) == len(rules)
        and all(
            one.name in rules
            and rules[one.name].plain
            and rules[one.name].fits(one.shape)
            and isinstance(one.data, bytes)
            for one in request.inputs
        )
    )


class RequestPattern:
    """What requests have in common that are the same but for their values, and their answers.

    It does not keep the `version` in memory. `find` gives the one that such requests go to by now, or raises
    `ServingError`. `runs`: whether they can go this way.
    """

    __slots__ = (
        "_around",
        "_dataplane",
        "_inputs",
        "_outputs",
        "_signature",
        "_ways",
        "find",
        "request",
        "runs",
        "version",
    )

    def __init__(
        self, dataplane: DataPlane, ways: Ways[Any], find: Callable[[], Servable], servable: Servable
    ) -> None:
        self._dataplane = dataplane
        self._ways = ways
        self.find = find
        self.version = weakref.ref(servable)
        self.runs = False
        self.request = InferenceRequest(servable.name)
        """Without values."""
        self._signature = ""
        self._inputs: Inputs = ()
        self._outputs: Sequence[tuple[str, np.dtype[Any]]] = ()
        self._around: dict[tuple[tuple[int, ...], ...], Around] = {}

    def learn_request(self, servable: Servable, request: InferenceRequest, places: Sequence[slice]) -> None:
        """They are all like this one, with the values of its inputs at these places. Raises `ServingError`."""
        call = Call()
        signature = admit(servable, request, call)
        arrays = bind_inputs(signature, request)
        self._inputs = [
            (one.name, arrays[one.name].dtype, one.shape, place)
            for one, place in zip(request.inputs, places, strict=True)
        ]
        self._signature = call.signature_name
        self._outputs = [
            (name, rule.dtype)
            for name, rule in signature.output_rules.items()
            if not request.outputs or name in request.outputs
        ]
        self.request = request
        request.inputs = []
        self.runs = True

    def begin(self, data: bytes, call: Call, observed: Observation, reply: Reply) -> RepeatedCall:
        """Run it; the reply may be told of its end before this returns."""
        servable = self.version()
        assert servable is not None  # It has just been found.
        inputs: dict[str, Array] = {}
        for name, dtype, shape, place in self._inputs:
            inputs[name] = ndarray(shape, dtype, data[place])
        observed.decoded()
        self._dataplane.begin(servable, call)
        call.signature_name = self._signature
        call.requested_outputs = self.request.outputs
        repeated = RepeatedCall(self, servable, inputs, call, observed, reply)
        servable.submit(repeated)
        return repeated

    def encoded(self, answer: Any) -> bytes | None:
        """A model's answer; None for one that is not known to be like earlier ones."""
        if type(answer) is not dict:
            return None
        if len(self._outputs) != 1:
            return self._several(answer)
        # As below, in a third of the time: most models have one output.
        name, dtype = self._outputs[0]
        array = answer.get(name)
        if type(array) is not ndarray or array.dtype is not dtype:
            return None
        around = self._around.get((array.shape,))
        return None if around is None else around[0] + array.tobytes() + around[1]

    def _several(self, answer: dict[Any, Any]) -> bytes | None:
        shapes, values = [], []
        for name, dtype in self._outputs:
            array = answer.get(name)
            if type(array) is not ndarray or array.dtype is not dtype:
                return None
            shapes.append(array.shape)
            values.append(array)
        around = self._around.get(tuple(shapes))
        if around is None:
            return None
        pieces: list[bytes] = []
        for before, array in zip(around, values, strict=False):
            pieces += before, array.tobytes()
        pieces.append(around[-1])
        return b"".join(pieces)

    def answer(self, call: RepeatedCall) -> Any:
        """What the ordinary way encodes; the next ones may be like it. Raises `ServingError`."""
        # No name here refers to the model's answer: see `may_scatter`.
        request, servable = self.request, call.servable
        response = response_of(servable, servable.signatures[self._signature], request, call.result)
        if type(call.result) is dict and sum([one.array.nbytes for one in response.outputs]) <= SMALL_BYTES:
            around = self._ways.around(response, request)
            if around is not None:
                if len(self._around) >= MOST_LAYOUTS:
                    self._around.clear()
                self._around[tuple([one.array.shape for one in response.outputs])] = around
        return self._ways.answer(response, request)

    def worded(self, error: ServingError) -> ServingError:
        """The protocol's own form of an error."""
        return self._ways.worded(error)


class RepeatedCall(Submission):
    """One call, on its way through the model."""

    __slots__ = ("_observed", "_pattern", "_reply")

    def __init__(
        self,
        pattern: RequestPattern,
        servable: Servable,
        inputs: dict[str, Array],
        call: Call,
        observed: Observation,
        reply: Reply,
    ) -> None:
        super().__init__(servable, inputs, call, reply.defer)
        self._pattern = pattern
        self._observed = observed
        self._reply: Reply | None = reply

    def _last(self) -> Reply:
        """The reply, for the last time: it may hold this call."""
        reply, self._reply = self._reply, None
        assert reply is not None
        return reply

    def ended(self) -> None:
        """See the base class."""
        observed, reply = self._observed, self._last()
        observed.answered()
        encoded = None if self.error is not None else self._pattern.encoded(self.result)
        if encoded is None:
            reply.conclude(self, observed)
            return
        self.result = None  # As of an `AwaitedExecution`.
        # Before the client hears of it, so that who asks next finds it counted.
        observed.finish(len(encoded))
        reply.respond(encoded)

    def __await__(self) -> Generator[Any, None, Any]:
        """Gives what the ordinary way encodes; the model's answer is its own meanwhile. Raises `ServingError`."""
        return self._outcome().__await__()

    async def _outcome(self) -> Any:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise self._pattern.worded(error)
            began = perf_counter()
            told = self._pattern.answer(self)
            self.call.output_seconds += perf_counter() - began
            return told
        finally:
            del error  # It has the traceback, which has this frame.

    def cancel(self) -> bool:
        """See the base class."""
        if not super().cancel():
            return False
        self._observed.end(self._last().given_up())
        return True

    def cancelling(self) -> int:
        """Nothing: it ends when it is cancelled."""
        return 0
