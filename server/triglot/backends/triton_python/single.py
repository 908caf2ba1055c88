"""A Triton Python model that gives one response to each request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from triglot.backends.triton_python.errors import TritonError
from triglot.backends.triton_python.home import Home
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.model import Inputs, PlacedModel
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.response import InferenceResponse
from triglot.backends.triton_python.sender import Line
from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError, is_serving_error
from triglot.core.types import Answer
from triglot.model.reshaping import Reshaping

log = logging.getLogger(__name__)

Outcome = Answer | ServingError
_LEFT = "the caller left before the request was executed again"


class SingleResponseModel(PlacedModel):
    """What the model raises fails all requests of the list, with its text, as in Triton: it is the user's own code
    that words it. A response with an error is its own request's alone.
    """

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, home: Home) -> None:
        super().__init__(instances, modules, home)
        self.infer_batch = self._infer_batch

    def infer(self, inputs: Inputs, call: Call) -> Answer:
        """One request as a list of one; raises the error of its response, and as `infer_batch`."""
        [outcome] = self._infer_batch([inputs], [call])
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    def _infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Outcome]:
        """The requests as a list. Raises `Internal` for what `execute` raises, and for what it must not return."""
        instance = self._mine()
        outlets = [_Outlet() for _ in calls]
        lines = [
            Line(call, outlet, decoupled=False, reshaping=self.reshaping)
            for call, outlet in zip(calls, outlets, strict=True)
        ]
        requests = [self._request(*one) for one in zip(inputs, calls, lines, strict=True)]
        given = _executed(instance, requests, calls, lines)
        requests.clear()
        outcomes: list[Outcome] = []
        for response, outlet in zip(given, outlets, strict=True):
            line = lines.pop(0)
            line.closed = line.closed or response is not None
            del line  # Only the model's own senders keep it now.
            outcomes.append(outlet.wait() if response is None else _outcome(response, self.reshaping))
        return outcomes


class _Outlet:
    """Where a model that gives one response sends it, instead of returning it."""

    __slots__ = ("_outcome", "_sent")

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._sent = threading.Lock()  # Held until it is there; an event would take ten times as long to make.
        self._sent.acquire()

    def put(self, answer: Outcome) -> None:
        """The response."""
        self._outcome = answer
        self._report()

    def end(self) -> None:
        """There is none any more."""
        if self._outcome is None:
            self._outcome = Internal("the model has sent TRITONSERVER_RESPONSE_COMPLETE_FINAL and no response")
        self._report()

    def _report(self) -> None:
        with suppress(RuntimeError):  # It has been told.
            self._sent.release()

    def wait(self) -> Outcome:
        """The response, which may come from another thread yet."""
        self._sent.acquire()
        assert self._outcome is not None
        return self._outcome


def _executed(
    instance: Instance, requests: Sequence[Any], calls: Sequence[Call], lines: Sequence[Line]
) -> list[Any]:
    """A response for each request, None where it is sent; those that are rescheduled are executed again.

    Raises as `_executed_once`, while no request has a response.
    """
    given = _executed_once(instance, requests, calls, lines)
    left: Sequence[int] = range(len(requests))
    while left := [at for at in left if given[at] is None and lines[at].again]:
        for at in left:
            requests[at].come_again()
            if calls[at].cancelled:
                given[at] = InferenceResponse(error=TritonError(_LEFT, TritonError.CANCELLED))
        left = [at for at in left if given[at] is None]
        if left:
            try:
                responses = _executed_once(
                    instance, [requests[at] for at in left], [calls[at] for at in left], [lines[at] for at in left]
                )
            except ServingError as error:
                responses = [InferenceResponse(error=TritonError(error.message)) for _ in left]
            for at, response in zip(left, responses, strict=True):
                given[at] = response
    return given


def _executed_once(
    instance: Instance, requests: Sequence[Any], calls: Sequence[Call], lines: Sequence[Line]
) -> list[Any]:
    """Raises `Internal` for what `execute` raises, and for what it must not return."""
    try:
        returned = instance.execute(requests, calls)
        if isinstance(returned, Future):
            returned = returned.result()
        return _given(returned, lines)
    except BaseException as error:
        if is_serving_error(error):
            log.error("%s: %s", instance.name, error.message)
            raise
        raise instance.failure(error) from error


def _outcome(response: InferenceResponse, reshaping: Reshaping | None) -> Outcome:
    try:
        return response.answer(reshaping)
    except ServingError as error:
        return error


def _given(returned: Any, lines: Sequence[Line]) -> list[Any]:
    """A response for each request, None where it is sent; anything but a response becomes an error of its request.

    Raises `Internal` for what is no list of the right length.
    """
    if returned is None:
        returned = [None] * len(lines)
    if not isinstance(returned, list | tuple):
        raise Internal(
            f"Expected a list in the execute return, found type '{type(returned).__name__}': execute() is to "
            f"return one InferenceResponse for each of its {len(lines)} requests"
        )
    if len(returned) != len(lines):
        raise Internal(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{len(lines)}, and InferenceResponse(s) size is:{len(returned)}"
        )
    return [_checked(response, line) for response, line in zip(returned, lines, strict=True)]


def _checked(response: Any, line: Line) -> InferenceResponse | None:
    if response is None and (line.taken or line.again):
        return None
    if isinstance(response, InferenceResponse):
        return response
    text = (
        "Expected an 'InferenceResponse' object in the execute function return list, "
        f"found type '{type(response).__name__}'"
    )
    log.error("%s", text)
    return InferenceResponse(error=TritonError(text))
