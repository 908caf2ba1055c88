"""A Triton Python model that returns one response per request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from triglot.backends.triton_python.context import ModelContext
from triglot.backends.triton_python.errors import TritonError, TritonModelException
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.model import Inputs, PlacedModel
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.response import InferenceResponse
from triglot.backends.triton_python.sender import ResponseChannel
from triglot.core.call import Call
from triglot.core.errors import Cancelled, Internal, ServingError, is_serving_error, own_copy
from triglot.core.types import Answer

log = logging.getLogger(__name__)

Outcome = Answer | ServingError
_Item = tuple[Any, Call, ResponseChannel]
"""A request, its call, and the channel of its response."""


class SingleResponseModel(PlacedModel):
    """A model that is not decoupled.

    An exception fails those requests of the list that have no response yet, with its text as in Triton: it is
    the user's own code. A response with an error affects only its own request.
    """

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, context: ModelContext) -> None:
        super().__init__(instances, modules, context)
        self.infer_batch = self._infer_batch

    def infer(self, inputs: Inputs, call: Call) -> Answer:
        """Run a list of one request; raise the error of its response, and as `infer_batch` does."""
        [outcome] = self._infer_batch([inputs], [call])
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    def _infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Outcome]:
        """Run the requests as a list; return the response or error of each."""
        outlets = [_Outlet() for _ in calls]
        queued = list(map(self._item, inputs, calls, outlets))
        _execute(self._current_instance(), queued)
        queued.clear()  # Only the model's own senders now refer to the channels.
        return [outlet.wait() for outlet in outlets]

    def _item(self, inputs: Inputs, call: Call, outlet: _Outlet) -> _Item:
        channel = ResponseChannel(call, outlet, decoupled=False, reshaping=self.reshaping)
        return self._request(inputs, call, channel), call, channel


class _Outlet:
    """Receives the one response to a request."""

    __slots__ = ("_outcome", "_sent")

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._sent = threading.Lock()  # Released by the response; creating an event takes ten times as long.
        self._sent.acquire()

    def put(self, response: Outcome) -> None:
        """Store the response; called once."""
        self._outcome = response
        self._sent.release()

    def end(self) -> None:
        """Do nothing, as `put` was called before."""

    def wait(self) -> Outcome:
        """Wait for the response, which may come from another thread, and return it."""
        self._sent.acquire()
        assert self._outcome is not None
        return self._outcome


def _execute(instance: Instance, queued: Sequence[_Item]) -> None:
    """Run `execute`, and again for rescheduled requests.

    Afterwards each request has its response, or a sender that the model keeps.
    """
    while queued:
        try:
            _execute_once(instance, queued)
        except ServingError as error:
            for _, _, channel in queued:
                channel.fail(own_copy(error))
            return
        queued = [item for item in queued if _is_rescheduled(*item)]


def _execute_once(instance: Instance, queued: Sequence[_Item]) -> None:
    """Run `execute` once. Raise `Internal` for its exceptions, and for an invalid result."""
    requests, calls, channels = zip(*queued, strict=True)
    try:
        returned = instance.execute(requests, calls)
        if isinstance(returned, Future):
            returned = returned.result()
        for channel, response in zip(channels, _responses(returned, len(channels)), strict=True):
            _respond(instance, channel, response)
    except BaseException as error:
        if is_serving_error(error):
            log.error("%s: %s", instance.name, error.message)
            raise
        raise instance.failure(error) from error


def _is_rescheduled(request: Any, call: Call, channel: ResponseChannel) -> bool:
    if channel.rescheduled and call.cancelled:
        channel.fail(Cancelled("the request was cancelled before it was executed again"))
    elif channel.rescheduled:
        request.reschedule()
        return True
    return False


def _responses(returned: Any, count: int) -> Sequence[Any]:
    """Return the result of `execute` per request. Raise `Internal` unless it is a list of the right length."""
    if returned is None:
        return [None] * count
    if not isinstance(returned, list | tuple):
        raise Internal(
            f"Expected a list in the execute return, found type '{type(returned).__name__}': execute() is to "
            f"return one InferenceResponse for each of its {count} requests"
        )
    if len(returned) != count:
        raise Internal(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(returned)}"
        )
    return returned


def _respond(instance: Instance, channel: ResponseChannel, response: Any) -> None:
    """Send a response that `execute` returned; any other object becomes an error of its request."""
    if response is None and (channel.has_sender or channel.rescheduled):
        return
    if channel.rescheduled or not isinstance(response, InferenceResponse):
        # Triton's own text, with its spelling.
        wanted, which = (
            ("a None", " for reschduled request") if channel.rescheduled else ("an 'InferenceResponse'", "")
        )
        text = (
            f"Expected {wanted} object in the execute function return list{which}, "
            f"found type '{type(response).__name__}'"
        )
        log.error("%s: %s", instance.name, text)
        response, channel.rescheduled = InferenceResponse(error=TritonError(text)), False
    try:
        channel.send(response, final=True)
    except TritonModelException as error:  # A sender has already sent a response.
        log.error("%s: %s", instance.name, error)
