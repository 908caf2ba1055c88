"""A decoupled Triton Python model of sequences.

Strategy: which instance a sequence belongs to, and whose turn it is there, is the engine's business, so its
threads call `execute`, with one request at a time: the next one has to wait for the final flag. A request is a
generator that yields nothing, since its senders put the responses into its stream themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

from triglot.backends.triton_python.decoupled import no_none
from triglot.backends.triton_python.model import Inputs, PlacedModel
from triglot.backends.triton_python.sender import Line
from triglot.core.call import Call
from triglot.core.errors import ServingError, is_serving_error
from triglot.core.types import Answer


class _Outlet:
    """What a request's senders put goes to its reader at once. See `Outlet`."""

    __slots__ = ("_call", "_ended", "_error")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._ended = threading.Event()
        self._error: ServingError | None = None

    def put(self, answer: Answer | ServingError) -> None:
        if isinstance(answer, ServingError):
            self._error = answer
        else:
            self._call.respond(answer)

    def end(self) -> None:
        self._ended.set()

    def wait(self) -> None:
        """Until the final flag. Raises the error that came in place of a response."""
        self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


class DecoupledSequencesModel(PlacedModel):
    """See above."""

    def infer(self, inputs: Inputs, call: Call) -> Iterator[Answer]:
        """One request. Raises the error of a response that has one, and what `execute` raises, with its text."""
        outlet = _Outlet(call)
        self._execute(inputs, call, outlet)
        outlet.wait()
        yield from ()

    def _execute(self, inputs: Inputs, call: Call, outlet: _Outlet) -> None:
        """Nothing here keeps the request's line: only the model's own senders do then."""
        instance = self._mine()
        line = Line(call, outlet, decoupled=True, reshaping=self.reshaping)
        try:
            request = self._request(inputs, call, line)
            while True:
                returned = instance.execute([request], [call])
                if isinstance(returned, Future):
                    returned = returned.result()
                if returned is not None:
                    raise no_none(instance, returned)
                if line.again and call.cancelled:
                    outlet.end()  # Nobody asks the model for a final flag any more.
                    break
                if not line.again:
                    break
                request.come_again()
        except BaseException as error:
            if is_serving_error(error):
                raise
            raise instance.failure(error) from error
