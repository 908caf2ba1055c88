"""KServe V2's requests with one answer, and their errors in the protocol's words."""

from __future__ import annotations

from triglot.core.call import Call
from triglot.core.errors import ServingError, Unimplemented
from triglot.core.running import Defer, Done, OnLoop, Outcome
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane, Decoupled
from triglot.dataplane.inference import Awaited
from triglot.protocols.kserve.errors import name_request
from triglot.protocols.kserve.extended_plane import ExtendedPlane


class UnaryInference:
    """See `Inferring`. `endpoint` is what the error of a decoupled model calls the way that the request came."""

    def __init__(self, dataplane: DataPlane, extended: ExtendedPlane, endpoint: str) -> None:
        self._dataplane = dataplane
        self._extended = extended
        self._endpoint = endpoint

    def submit(self, request: InferenceRequest, call: Call, done: Done, defer: Defer | None = None) -> OnLoop:
        """See `Inferring`."""
        if request.options is not None:
            return Awaited(self._extended.infer(request, call), done)
        call.model_name = request.model_name
        try:
            servable = self._dataplane.servable_of(request)
        except ServingError as error:
            raise name_request(error, request.id) from None
        return self._dataplane.submit(servable, request, call, done, defer)

    def answer(self, outcome: Outcome, _: InferenceRequest) -> InferenceResponse:
        """See `Inferring`."""
        response: InferenceResponse = outcome.answer
        return response

    def map_error(self, error: ServingError, _: Outcome, request: InferenceRequest) -> ServingError:
        """See `Inferring`."""
        if isinstance(error, Decoupled):
            return Unimplemented(f"{self._endpoint} doesn't support models with decoupled transaction policy")
        return name_request(error, request.id)
