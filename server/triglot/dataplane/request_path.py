"""The path of a request through the data plane: from its servable to the model, and the checked response."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any, Final

from triglot.core.call import Call, Reach, no_models
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import (
    Internal,
    ModelNotFound,
    ServingError,
    Unavailable,
    Unimplemented,
    as_serving_error,
    without_frames,
)
from triglot.core.operation import EVERYTHING, Permission
from triglot.core.request_scheduling import scheduling_of
from triglot.core.response_buffer import NOTHING
from triglot.core.running import Defer, Sink, Watcher
from triglot.core.types import Answer, InferenceRequest, InferenceResponse, ParameterValue
from triglot.dataplane.coroutines import store_copy, submit_prepared
from triglot.executors.work import Receiver, Work
from triglot.model.config import Recording
from triglot.model.signature import Signature, signature_with
from triglot.model.validation import (
    InvalidRequest,
    bind_inputs,
    bind_outputs,
    check_parameters,
    check_requested_outputs,
    check_shapes,
    takes_long,
)
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.registry import UnknownLabel
from triglot.repository.manager.sequences import SequenceRoutes
from triglot.scheduling.loaded_version import LoadedVersion
from triglot.scheduling.response_cache import OFF_LOOP_BYTES, Key, ModelCache
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Observer
from triglot.telemetry.tracing import Tracer

log = logging.getLogger(__name__)


def admit(servable: LoadedVersion, request: InferenceRequest, call: Call) -> Signature:
    """Return the signature of the request, and set the call's fields that the model may read.

    It is the one that it names, or else the default one, or the only one that has the outputs that it requests.

    Raise `InvalidRequest` for a signature or requested outputs that do not exist.
    """
    name = request.signature_name or servable.default_signature
    signature = servable.signatures.get(name)
    if signature is None:
        has = ", ".join(sorted(servable.signatures))
        raise InvalidRequest(
            f"model '{servable.name}' has no signature '{name}', only {has}{servable.why_unservable(name)}"
        )
    if request.outputs or signature.unservable_outputs:
        if request.outputs and not request.signature_name and len(servable.signatures) > 1:
            name = signature_with(servable.signatures, name, request.outputs)
            signature = servable.signatures[name]
        check_requested_outputs(signature, request, servable.signatures)
        call.requested_outputs = request.outputs
    call.request_id = request.id
    call.parameters = request.parameters
    if request.input_parameters is not None:
        call.input_parameters = request.input_parameters
    if request.output_parameters is not None:
        call.output_parameters = request.output_parameters
    if request.parameters:
        call.scheduling = scheduling_of(request.parameters, call.scheduling)
    call.signature_name = name
    return signature


def response_of(
    servable: LoadedVersion, signature: Signature, request: InferenceRequest, answer: object
) -> InferenceResponse:
    """Return the checked response for what the model returned.

    Raise `Internal` as `bind_outputs` and `check_parameters`, and logs it.
    """
    try:
        lenient = request.lenient_shapes or servable.any_output_shapes
        outputs = bind_outputs(signature, answer, request.outputs, servable.name, lenient_shapes=lenient)
        response = InferenceResponse(servable.name, str(servable.version), request.id, outputs)
        if not servable.on_loop:
            response.answer = answer
        if type(answer) is not dict and isinstance(answer, Answer):
            response.parameters = check_parameters(answer.parameters, servable.name)
            response.final = answer.final
            if answer.output_parameters:
                for output in outputs:
                    own = check_parameters(answer.output_parameters.get(output.name, {}), servable.name)
                    output.parameters = tuple(own.items())
    except Internal as error:
        log.error("%s", error.message)
        raise
    return response


class CheckedResponses(Receiver):
    """Checks what a model returned against its signature, and stores responses in the response cache."""

    __slots__ = ()

    def respond(self, work: Work, answer: Any) -> bool:
        """See `Receiver`. Raise as `response_of`."""
        if (times := work.times) is not None:
            response = times.convert(partial(_checked, work), answer)
        else:
            response = _checked(work, answer)
        for watcher in work.watchers or ():
            watcher.on_response(response)
        return work.sink.send(response)

    def finish(self, work: Work, error: ServingError | None) -> None:
        """See `Receiver`."""
        response: Any = NOTHING
        request = work.request
        if error is None:
            if work.answers_once:
                began = perf_counter()
                try:
                    response = _checked(work, None if work.result is NOTHING else work.result)
                except ServingError as failure:
                    error = without_frames(failure)
                work.call.output_seconds += perf_counter() - began
        elif request is not None and request.lenient_shapes and isinstance(error, Internal):
            # The model's own code may have seen the shapes before they were checked.
            try:
                check_shapes(work.signature, request)
            except ServingError as failure:
                error = without_frames(failure)
        if work.cache_key is not None and error is None and not response.parameters:
            version = _version(work)
            cache = version.response_cache
            assert cache is not None
            if cache.takes_long(response.outputs):
                storing = store_copy(version, work, cache, response, self.conclude)
                work.task = asyncio.get_running_loop().create_task(storing)
                return
            began = perf_counter()
            cache.store_copy(work.cache_key, response.outputs)
            work.call.cache_seconds += perf_counter() - began
        self.conclude(work, response, error)

    def conclude(self, work: Work, response: Any, error: ServingError | None) -> None:
        """End the traces and records, and pass the response, unless it is `NOTHING`, and the end to the sink."""
        for watcher in work.watchers or ():
            if work.streams and response is not NOTHING:
                watcher.on_response(response)
            watcher.on_end(None if work.streams or response is NOTHING else response)
        work.watchers = None
        sink = work.sink
        if response is not NOTHING:
            sink.send(response)
        sink.end(error)


CHECKED: Final = CheckedResponses()


def _version(work: Work) -> LoadedVersion:
    version = work.owner
    assert isinstance(version, LoadedVersion)
    return version


def _checked(work: Work, answer: Any) -> Any:
    """Return the response for what the model returned; an answer to a protocol's message is one already."""
    if work.request is None:
        return answer
    return response_of(_version(work), work.signature, work.request, answer)


@mypyc_attr(native_class=False)
class Decoupled(Unimplemented):
    """The model returns a stream of responses, but the call takes one."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestRecorder(Observer):
    """Records requests to models with their responses. A part."""

    def configure(self, own: Mapping[str, Recording]) -> None:
        """Set the recordings of these models; all others use the server's own setting."""

    @abstractmethod
    def record(self, servable: Servable, request: InferenceRequest, call: Call) -> Watcher | None:
        """Return what observes the request's responses; None if it is not recorded."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TrafficRules:
    """Divides the calls of models among their versions, and copies calls to shadows. A part."""

    @abstractmethod
    def route(self, servable: Servable, call: Call, parameters: Mapping[str, ParameterValue]) -> Servable:
        """Return the version for a call that names none; `servable` is the default one."""

    @abstractmethod
    def copy(self, servable: Servable, request: InferenceRequest, call: Call) -> Watcher | None:
        """Return what copies the request once it has ended; None if it is not copied."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestPath:
    """Finds the servable, validates the request against its signature, runs it and checks the response.

    On the event loop.
    """

    def __init__(self, manager: Manager, default_timeout: float, tracer: Tracer | None) -> None:
        self.reach: Reach = no_models
        """Implements `Call.infer`; see `ModelCalls`."""
        self.tracer = tracer or Tracer()
        self.recorders: list[RequestRecorder] = []
        """What a configuration that has requests recorded, or sent on, asks for."""
        self.routes: TrafficRules | None = None
        """Set while a model has weights."""
        self.shadows: TrafficRules | None = None
        """Set while a model has a shadow."""
        self.sequences = SequenceRoutes(manager.registry)
        self._manager = manager
        self._registry = manager.registry
        self._default_timeout = default_timeout
        self._default_source = f"the server's default_timeout of {default_timeout:g} seconds"
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether the server is shutting down."""
        return self._stopped.is_set()

    def servable(self, permission: Permission, name: str, version: str = "", label: str = "") -> Servable:
        """Return the version for a name, and a version or label; a `with` block on it holds a lease.

        Raise `ModelNotFound`, `InvalidArgument` for a bad version or an unknown label, and `Unavailable`.
        """
        if not permission.covers_all:
            permission.check_model(name)
        try:
            return self._registry.servable(name, version, label)
        except (ModelNotFound, Unavailable, UnknownLabel) as error:
            raise self._missing(error, permission, name, version) from None

    def routed(self, servable: Servable, call: Call) -> Servable:
        """Return the version that runs a call that names no version; `servable` is the default one."""
        return servable if self.routes is None else self.routes.route(servable, call, {})

    def servable_of(self, call: Call, request: InferenceRequest) -> Servable:
        """Return the version for a request; if it continues a sequence, the version that holds its state."""
        permission = call.permission
        if not permission.covers_all:
            permission.check_model(request.model_name)
        if request.parameters and (holder := self.sequences.find(request)) is not None:
            return holder
        name, version = request.model_name, request.model_version
        try:
            servable = self._registry.servable(name, version)
        except (ModelNotFound, Unavailable) as error:
            raise self._missing(error, permission, name, version) from None
        if self.routes is None or version:
            return servable
        return self.routes.route(servable, call, request.parameters)

    def _missing(self, error: ServingError, permission: Permission, name: str, version: str) -> Exception:
        """Return what to raise for a version that does not serve: `ModelNotLoaded` if a load may change that."""
        why = self.load_error(permission, name, version)
        failure = type(error)(f"{error.message}: {why}") if why else error
        on_demand = self._manager.on_demand
        return failure if on_demand is None else on_demand.missing(name, failure)

    def load_error(self, permission: Permission, name: str, version: str = "") -> str:
        """Return why the version, or the model, could not be loaded; "" if it was not tried.

        With access control "", too: then RepositoryIndex and GetModelStatus, which have permissions of their own,
        give the reason.
        """
        if permission is not EVERYTHING or not self._registry.knows(name):
            return ""
        if self._registry.wanted_versions(name):
            return self._registry.load_error(name, version)
        if (broken := self._manager.broken().get(name)) is not None:
            return broken.message
        return "" if self._manager.on_demand is None else self._manager.on_demand.why(name)

    def start(
        self,
        servable: Servable,
        request: InferenceRequest | None,
        call: Call,
        sink: Sink,
        defer: Defer | None = None,
        *,
        leased: bool = False,
        streams: bool = False,
    ) -> Work:
        """Run one request on this version: the only way to the model.

        The responses go to `sink`, maybe before this returns. `request` is None for a model that takes a
        protocol's messages: its message is `call.exchange`. `defer`: see `Schedule.put`. `leased`: the caller
        holds a lease until the end. `streams`: the caller takes any number of responses.
        """
        version: LoadedVersion = servable
        work = Work({}, call, sink, CHECKED, streams=streams)
        work.owner, work.request, work.defer, work.leased = version, request, defer, leased
        try:
            if self.tracer.on and (trace := self.tracer.begin(servable.name, servable.version, call, request)):
                work.watchers = [trace]
            if request is not None:
                for recorder in self.recorders:
                    if record := recorder.record(servable, request, call):
                        work.watchers = [*(work.watchers or ()), record]
            if (
                self.shadows is not None
                and request is not None
                and (copy := self.shadows.copy(servable, request, call))
            ):
                work.watchers = [*(work.watchers or ()), copy]
            self.begin(version, call)
            if request is not None:
                if version.decoupled and not streams:
                    raise Decoupled("the model returns a stream of responses")
                signature = work.signature = admit(version, request, call)
                if version.sequences is not None or (signature.takes_bytes and takes_long(request)):
                    self._submit_later(servable, work, request)
                    return work
                began = perf_counter()
                work.inputs = bind_inputs(signature, request)
                call.input_seconds += perf_counter() - began
                if version.response_cache is not None and not streams:
                    if call.size > OFF_LOOP_BYTES or version.response_cache.digests_long(work.inputs):
                        self._submit_later(servable, work, request)
                        return work
                    if self.find_cached(version.response_cache, work, request):
                        return work
        except Exception as error:
            self.fail(servable, work, error)
            return work
        version.submit(work)
        return work

    def fail(self, servable: Servable, work: Work, error: Exception) -> None:
        """End work that could not be submitted."""
        work.over = True
        CHECKED.finish(work, without_frames(as_serving_error(error, str(servable))))

    def _submit_later(self, servable: Servable, work: Work, request: InferenceRequest) -> None:
        """Submit in a task: a request that takes long to bind or to digest, or that belongs to a sequence."""
        lease = servable.__enter__()

        def on_end(task: asyncio.Task[None]) -> None:
            if not work.over and work.task is task:
                work.task = None
                work.drop()
            lease.__exit__()

        task = work.task = self._loop.create_task(submit_prepared(self, servable, work, request))
        task.add_done_callback(on_end)

    def find_cached(
        self,
        cache: ModelCache,
        work: Work,
        request: InferenceRequest,
        key: Key | None = None,
        began: float = 0.0,
    ) -> bool:
        """Look up the response in the cache.

        If it is there, end the work with it and return True. Else note the key to store it.
        """
        call = work.call
        began = began or perf_counter()
        work.cache_key = key = key or cache.key(work.inputs, call, request)
        cached = cache.find(key)
        call.cache_hit, call.cache_seconds = cached is not None, perf_counter() - began
        if cached is None:
            return False
        work.over = True
        CHECKED.conclude(
            work, InferenceResponse(call.model_name, str(call.model_version), request.id, cached), None
        )
        return True

    def begin(self, servable: LoadedVersion, call: Call) -> None:
        """Set the call's model and version, which telemetry reads, and its default deadline."""
        call.model_name, call.model_version = servable.name, servable.version
        if call.is_counted:
            call.statistics = servable.statistics
        if call.reach is no_models:  # Calls made by models have it set already.
            call.reach = self.reach
        # No default deadline for warm-ups and for calls made by models, which end with the calling model's own
        # call.
        if self._default_timeout and call.deadline is None and call.size:
            call.limit(self._default_timeout, self._default_source)
