"""Runs KServe V2's requests with one response, and maps their errors to the protocol's texts."""

from __future__ import annotations

from triglot.core.call import Call
from triglot.core.coroutine_work import CoroutineWork
from triglot.core.errors import ServingError, Unimplemented
from triglot.core.running import Defer, Running, Sink
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane, Decoupled
from triglot.protocols.kserve.errors import name_request
from triglot.protocols.kserve.extended_plane import ExtendedPlane
from triglot.protocols.kserve.parameters import wants_typed
from triglot.protocols.rows import InferenceHandler


class UnaryInference(InferenceHandler):
    """The handler of requests with one response. `endpoint` names the route in the error of a decoupled model.

    `typed`: the default for outputs as `contents`, for requests without that parameter.
    """

    def __init__(
        self, dataplane: DataPlane, extended: ExtendedPlane, endpoint: str, *, typed: bool = False
    ) -> None:
        self._dataplane = dataplane
        self._extended = extended
        self._endpoint = endpoint
        self._typed = typed

    def start(self, request: InferenceRequest, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        if request.options is not None:
            return CoroutineWork(self._extended.infer(request, call), sink)
        call.model_name = request.model_name
        try:
            servable = self._dataplane.servable_of(call.permission, request)
        except ServingError as error:
            call.request_id = request.id
            raise name_request(error, request.id) from None
        return self._dataplane.start(servable, request, call, sink, defer)

    def answer(self, response: InferenceResponse, request: InferenceRequest) -> InferenceResponse:
        if self._typed or request.parameters:
            response.typed = wants_typed(request, self._typed)
        return response

    def map_error(self, error: ServingError, request: InferenceRequest, _: Call) -> ServingError:
        if isinstance(error, Decoupled):
            return Unimplemented(f"{self._endpoint} doesn't support models with decoupled transaction policy")
        return name_request(error, request.id)
