"""A decoupled Triton Python model with sequence batching.

The server's scheduler assigns sequences to instances and orders their requests, so its threads call `execute`,
with one request at a time: the next one waits for the final flag. `infer` is a generator that yields nothing, as
the senders put the responses into the request's stream themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

from triglot.backends.triton_python.decoupled import unexpected_result
from triglot.backends.triton_python.model import Inputs, PlacedModel
from triglot.backends.triton_python.sender import ResponseChannel
from triglot.core.call import Call
from triglot.core.errors import ServingError, is_serving_error
from triglot.core.types import Answer


class _Outlet:
    """Passes responses from a request's senders to its stream immediately. See `Outlet`."""

    __slots__ = ("_call", "_end", "_error")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._end = threading.Event()
        self._error: ServingError | None = None

    def put(self, response: Answer | ServingError) -> None:
        if isinstance(response, ServingError):
            self._error = response
        else:
            self._call.respond(response)

    def end(self) -> None:
        self._end.set()

    def wait(self) -> None:
        """Wait for the final flag. Raise the error that was sent as a response."""
        self._end.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


class DecoupledSequencesModel(PlacedModel):
    """See the module docstring."""

    def infer(self, inputs: Inputs, call: Call) -> Iterator[Answer]:
        """Run one request. Raise the error of a response, and the exception of `execute` with its text."""
        outlet = _Outlet(call)
        self._execute(inputs, call, outlet)
        outlet.wait()
        yield from ()

    def _execute(self, inputs: Inputs, call: Call, outlet: _Outlet) -> None:
        """Run `execute`. Afterwards only the model's own senders keep the request's `ResponseChannel` alive."""
        instance = self._current_instance()
        channel = ResponseChannel(call, outlet, decoupled=True, reshaping=self.reshaping)
        try:
            request = self._request(inputs, call, channel)
            while True:
                returned = instance.execute([request], [call])
                if isinstance(returned, Future):
                    returned = returned.result()
                if returned is not None:
                    raise unexpected_result(instance, returned)
                if channel.rescheduled and call.cancelled:
                    outlet.end()  # A cancelled request needs no final flag.
                    break
                if not channel.rescheduled:
                    break
                request.reschedule()
        except BaseException as error:
            if is_serving_error(error):
                raise
            raise instance.failure(error) from error
