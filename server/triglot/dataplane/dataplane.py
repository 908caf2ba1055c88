"""The data plane: the one way in which every protocol runs models, inspects them and controls them."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar

from triglot.core.awaiting import Responses
from triglot.core.call import Call, Reach, no_models
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
from triglot.core.tensor import LONG_BYTES, Array
from triglot.core.types import Answer, InferenceRequest, InferenceResponse
from triglot.dataplane.control import LOAD_MODEL, RELOAD, UNLOAD_MODEL, Arguments, Control
from triglot.executors.work import Receiver, Work
from triglot.model.config import Recording
from triglot.model.signature import ModelMetadata, Signature
from triglot.model.validation import (
    InvalidRequest,
    bind_inputs,
    bind_outputs,
    check_parameters,
    check_requested_outputs,
    check_shapes,
)
from triglot.repository.config.completed import Loaded
from triglot.repository.config.model_config import parse_override
from triglot.repository.config.settings import ModelSettings, settings_fields, settings_of
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.plan import Version
from triglot.repository.manager.sequences import SequenceRoutes
from triglot.scheduling.response_cache import OFF_LOOP_BYTES, Key, ModelCache
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Observer
from triglot.telemetry.tracing import Tracer

T = TypeVar("T")


log = logging.getLogger(__name__)


def admit(servable: Servable, request: InferenceRequest, call: Call) -> Signature:
    """Return the signature that the request names, and sets the call's fields that the model may read.

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
        check_requested_outputs(signature, request)
        call.requested_outputs = request.outputs
    call.request_id = request.id
    call.parameters = request.parameters
    if request.input_parameters is not None:
        call.input_parameters = request.input_parameters
    if request.parameters:
        call.scheduling = scheduling_of(request.parameters, call.scheduling)
    call.signature_name = name
    return signature


def takes_long(request: InferenceRequest) -> bool:
    """Return whether the inputs have too many bytes to bind BYTES elements, one by one, on the event loop."""
    return sum([len(tensor.data) for tensor in request.inputs]) > LONG_BYTES


async def bind(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """Return the bound inputs; raises as `bind_inputs`. Large BYTES inputs are bound on a thread."""
    if signature.takes_bytes and takes_long(request):
        return await asyncio.to_thread(bind_inputs, signature, request)
    return bind_inputs(signature, request)


def response_of(
    servable: Servable, signature: Signature, request: InferenceRequest, answer: object
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
            cache = _servable(work).response_cache
            assert cache is not None
            if cache.takes_long(response.outputs):
                work.task = asyncio.get_running_loop().create_task(self._store_copy(work, cache, response))
                return
            began = perf_counter()
            cache.store_copy(work.cache_key, response.outputs)
            work.call.cache_seconds += perf_counter() - began
        self.conclude(work, response, error)

    async def _store_copy(self, work: Work, cache: ModelCache, response: InferenceResponse) -> None:
        """Copy a large response for the cache on a thread.

        It is reported after that, as the model may reuse its memory.
        """
        assert work.cache_key is not None
        began = perf_counter()
        with suppress(asyncio.CancelledError), _servable(work):
            copied = await asyncio.to_thread(cache.copied, response.outputs)
            cache.store(work.cache_key, copied)
        work.call.cache_seconds += perf_counter() - began
        self.conclude(work, response, None)

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


def _servable(work: Work) -> Servable:
    servable = work.owner
    assert isinstance(servable, Servable)
    return servable


def _checked(work: Work, answer: Any) -> Any:
    """Return the response for what the model returned; an answer to a protocol's message is one already."""
    if work.request is None:
        return answer
    return response_of(_servable(work), work.signature, work.request, answer)


class Decoupled(Unimplemented):
    """The model returns a stream of responses, but the call takes one."""


class RequestRecorder(Observer):
    """Records requests to models with their responses. A part."""

    @abstractmethod
    def configure(self, own: Mapping[str, Recording]) -> None:
        """Set the recordings of these models; all others use the server's own setting."""

    @abstractmethod
    def record(self, servable: Servable, request: InferenceRequest, call: Call) -> Watcher | None:
        """Return what observes the request's responses; None if it is not recorded."""


class DataPlane:
    """Finds the servable, validates the request against its signature, runs it and checks the response.

    One per server, on the event loop. Methods that take a model's name also take the client's permission, or
    its call: a name that the permission does not cover raises `PermissionDenied`, whether the model exists or
    not. Methods that return several models return those that it covers.
    """

    def __init__(
        self,
        manager: Manager,
        *,
        default_timeout: float = 0.0,
        tracer: Tracer | None = None,
        control: Control | None = None,
    ) -> None:
        self.reach: Reach = no_models
        """Implements `Call.infer`; see `ModelCalls`."""
        self.tracer = tracer or Tracer()
        self.recorder: RequestRecorder | None = None
        """What a configuration that has requests recorded asks for."""
        self.control = control or Control()
        self._manager = manager
        self._registry = manager.registry
        self._sequences = SequenceRoutes(self._registry)
        self._default_timeout = default_timeout
        self._default_source = f"the server's default_timeout of {default_timeout:g} seconds"
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()
        self._registry.changes.subscribe(self._announce)
        self.control.register_action(LOAD_MODEL, self._load)
        self.control.register_action(UNLOAD_MODEL, self._unload)
        self.control.register_action(RELOAD, self._reload)

    def servable(self, permission: Permission, name: str, version: str = "", label: str = "") -> Servable:
        """Return the version for a name, and a version or label; a `with` block on it holds a lease.

        Raise `ModelNotFound`, `InvalidArgument` for a bad version or an unknown label, and `Unavailable`.
        """
        if not permission.covers_all:
            permission.check_model(name)
        try:
            return self._registry.servable(name, version, label)
        except (ModelNotFound, Unavailable) as error:
            raise self._with_reason(error, permission, name, version) from None

    def servable_of(self, permission: Permission, request: InferenceRequest) -> Servable:
        """Return the version for a request; if it continues a sequence, the version that holds its state."""
        if not permission.covers_all:
            permission.check_model(request.model_name)
        if request.parameters and (holder := self._sequences.find(request)) is not None:
            return holder
        name, version = request.model_name, request.model_version
        try:
            return self._registry.servable(name, version)
        except (ModelNotFound, Unavailable) as error:
            raise self._with_reason(error, permission, name, version) from None

    def _with_reason(
        self, error: ModelNotFound | Unavailable, permission: Permission, name: str, version: str
    ) -> ServingError:
        why = self.load_error(permission, name, version)
        return type(error)(f"{error.message}: {why}") if why else error

    def load_error(self, permission: Permission, name: str, version: str = "") -> str:
        """Return why the version, or the model, could not be loaded; "" if it was not tried.

        With access control "", too: then RepositoryIndex and GetModelStatus, which have permissions of their own,
        give the reason.
        """
        if permission is not EVERYTHING or not self._registry.knows(name):
            return ""
        if self._registry.wanted_versions(name):
            return self._registry.load_error(name, version)
        broken = self._manager.broken().get(name)
        return "" if broken is None else broken.message

    async def infer(self, request: InferenceRequest, call: Call) -> InferenceResponse:
        """Return the response to one request.

        Raise `ServingError`: unknown model, invalid request, full queue, an error of the model; and
        `Decoupled` when the model returns a stream.
        """
        call.model_name = request.model_name
        with self.servable_of(call.permission, request) as servable:
            return await self.infer_on(servable, request, call)

    async def infer_on(self, servable: Servable, request: InferenceRequest, call: Call) -> InferenceResponse:
        """As `infer`, for a version on which the caller holds a lease."""
        response: InferenceResponse = await Responses(
            partial(self.start, servable, request, call, leased=True)
        ).only()
        return response

    def infer_stream(self, request: InferenceRequest, call: Call) -> Responses:
        """Return the responses of the model, to be closed. Raise as `infer`, and so do they."""
        call.model_name = request.model_name
        servable = self.servable_of(call.permission, request)
        return Responses(partial(self.start, servable, request, call, streams=True))

    def infer_stream_on(self, servable: Servable, request: InferenceRequest | None, call: Call) -> Responses:
        """Return the responses of the model, for a version on which the caller holds a lease; to be closed.

        They raise as `infer`. A model that is not decoupled gives one. `request`: see `start`.
        """
        return Responses(partial(self.start, servable, request, call, leased=True, streams=True))

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
        work = Work({}, call, sink, CHECKED, streams=streams)
        work.owner, work.request, work.defer, work.leased = servable, request, defer, leased
        try:
            if self.tracer.on and (trace := self.tracer.begin(servable.name, servable.version, call, request)):
                work.watchers = [trace]
            if (
                self.recorder is not None
                and request is not None
                and (record := self.recorder.record(servable, request, call))
            ):
                work.watchers = [*(work.watchers or ()), record]
            self.begin(servable, call)
            if request is not None:
                if servable.decoupled and not streams:
                    raise Decoupled("the model returns a stream of responses")
                signature = work.signature = admit(servable, request, call)
                if servable.sequences is not None or (signature.takes_bytes and takes_long(request)):
                    self._submit_later(servable, work, request)
                    return work
                began = perf_counter()
                work.inputs = bind_inputs(signature, request)
                call.input_seconds += perf_counter() - began
                if servable.response_cache is not None and not streams:
                    if call.size > OFF_LOOP_BYTES or servable.response_cache.digests_long(work.inputs):
                        self._submit_later(servable, work, request)
                        return work
                    if self._find_cached(servable.response_cache, work, request):
                        return work
        except Exception as error:
            work.over = True
            CHECKED.finish(work, without_frames(as_serving_error(error, str(servable))))
            return work
        servable.submit(work)
        return work

    def _submit_later(self, servable: Servable, work: Work, request: InferenceRequest) -> None:
        """Submit in a task: a request that takes long to bind or to digest, or that belongs to a sequence."""
        lease = servable.__enter__()

        def on_end(task: asyncio.Task[None]) -> None:
            if not work.over and work.task is task:
                work.task = None
                work.drop()
            lease.__exit__()

        task = work.task = self._loop.create_task(self._prepare(servable, work, request))
        task.add_done_callback(on_end)

    async def _prepare(self, servable: Servable, work: Work, request: InferenceRequest) -> None:
        try:
            if not work.inputs:
                began = perf_counter()
                work.inputs = await self._bound(servable, work.signature, request, work.call)
                work.call.input_seconds += perf_counter() - began
            if (cache := servable.response_cache) is not None and not work.streams:
                began = perf_counter()
                key = await asyncio.to_thread(cache.key, work.inputs, work.call, request)
                if self._find_cached(cache, work, request, key, began):
                    return
        except asyncio.CancelledError:
            return  # If raised, the task would keep it: a cycle of task, frames and work.
        except Exception as error:
            work.over = True
            CHECKED.finish(work, without_frames(as_serving_error(error, str(servable))))
            return
        work.task = work.defer = None  # Requests that arrived with it were started long ago.
        servable.submit(work)

    def _find_cached(
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

    async def _bound(
        self, servable: Servable, signature: Signature, request: InferenceRequest, call: Call
    ) -> dict[str, Array]:
        """Return the bound inputs, and registers a request that starts a sequence."""
        if servable.sequences is None:
            return await bind(signature, request)
        # Requests of one sequence must not overtake each other on threads.
        async with servable.sequences.binding:
            inputs = await bind(signature, request)
        if call.scheduling.sequence_start:
            if self.stopping:
                raise Unavailable(
                    "the server is shutting down: it continues open sequences and starts no new ones"
                )
            self._sequences.begin(servable, call.scheduling.sequence_id)
        return inputs

    def begin(self, servable: Servable, call: Call) -> None:
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

    def metadata(self, permission: Permission, name: str, version: str = "") -> ModelMetadata:
        """Return the model's metadata.

        Raise `ModelNotFound`, `InvalidArgument` for a bad version and `Unavailable` for one that is not ready.
        """
        servable = self.servable(permission, name, version)
        numbers = [servable.version] if version else self._registry.ready_versions(name)
        return ModelMetadata(
            name,
            [str(number) for number in numbers],
            servable.platform,
            servable.signature,
            servable.decoupled,
            servable.default_signature,
            servable.model.speaks_json,
            servable.sequences is not None,
            self._registry.names_of(name, numbers),
        )

    def serving(self, permission: Permission) -> list[ModelMetadata]:
        """Return the metadata of all ready models."""
        names = self.model_names(permission)
        return [self.metadata(permission, name) for name in names if self.model_ready(permission, name)]

    def loaded_from(self, permission: Permission, name: str, version: str = "") -> Loaded:
        """Return the source and configuration of a loaded version. Raise as `servable`."""
        return self._manager.loaded(self.servable(permission, name, version))

    def knows(self, permission: Permission, name: str) -> bool:
        """Return whether the model is to be served, ready or not; False for clients that may not use it."""
        return permission.covers(name) and self._registry.knows(name)

    def first_version(self, permission: Permission, name: str) -> str:
        """Return the first version listed in the model's configuration; "" where it lists none."""
        permission.check_model(name)
        return self._manager.first_version(name)

    def model_names(self, permission: Permission) -> list[str]:
        """Return the names of all models that are to be served, ready or not; no unloaded ones."""
        return list(filter(permission.covers, self._registry.served()))

    def known_names(self, permission: Permission) -> list[str]:
        """As `model_names`, with unloaded models."""
        return list(filter(permission.covers, self._registry.names()))

    def versions(self, permission: Permission) -> list[Version]:
        """Return every version that is to be served or still exists, those of unloaded models included."""
        return [version for version in self._registry.versions() if permission.covers(version.files.name)]

    def labelled(self, permission: Permission, name: str, label: str) -> int:
        """Return the version that a label names, available or not. Raise `UnknownLabel`."""
        permission.check_model(name)
        return self._registry.labelled(name, label)

    def labels_of(self, permission: Permission, name: str) -> dict[str, int]:
        """Return the labels of a model and their versions; {} for an unknown model."""
        permission.check_model(name)
        return self._registry.labels_of(name)

    def statuses(self, permission: Permission, name: str) -> list[Version]:
        """Return every remembered version of a model, ended ones included, highest first.

        Raise `ModelNotFound`.
        """
        permission.check_model(name)
        return self._registry.statuses(name)

    def platforms(self, permission: Permission) -> dict[str, str]:
        """Return the configured platform of each model in the configuration."""
        return permission.covered(self._manager.platforms())

    async def reload(self, permission: Permission, models: Sequence[ModelSettings]) -> None:
        """Serve exactly these models; needs permission for all models.

        Raise `ServingError` as `Manager.check_folders` and `Manager.reload`.
        """
        permission.check_all_models()
        await self._manager.check_folders(models)
        await self.control.act(RELOAD, {"models": list(map(settings_fields, models))})

    async def _reload(self, arguments: Arguments) -> None:
        await self._manager.reload(list(map(settings_of, arguments["models"])))

    async def load_model(
        self,
        permission: Permission,
        name: str,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load or reload a model. Raise `ServingError` as `Manager.load_model`.

        `files` is supported only by a server with one process. The permission must also cover the models of an
        ensemble that `config` defines.
        """
        permission.check_model(name)
        if config is not None and not permission.covers_all:
            # An ensemble calls the models of its steps without a permission check.
            message = await self.off_loop(partial(parse_override, config, name))
            for step in message.ensemble_scheduling.step:
                permission.check_model(step.model_name)
        sent = {"files": files} if files else {}
        await self.control.act(LOAD_MODEL, {"name": name, "config": config, **sent})

    async def _load(self, arguments: Arguments) -> bool:
        """Return whether the model was served before.

        Raise `Unavailable` if the server stops before it is loaded.
        """
        known = arguments["name"] in self._registry.served()
        load = self._manager.load_model(arguments["name"], arguments["config"], arguments.get("files"))
        loading = asyncio.ensure_future(load)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise Unavailable("the server is shutting down")
            loading.result()
            return known
        finally:
            loading.cancel()
            stopped.cancel()

    async def unload_model(self, permission: Permission, name: str, *, dependents: bool = False) -> None:
        """Unload a model. Raise as `Manager.unload_model`."""
        permission.check_model(name)
        await self.control.act(UNLOAD_MODEL, {"name": name, "dependents": dependents})

    async def _unload(self, arguments: Arguments) -> bool:
        return self._manager.unload_model(arguments["name"], dependents=arguments["dependents"])

    def broken(self, permission: Permission) -> dict[str, ServingError]:
        """Return the errors of models that are to be served but have no version at all."""
        return permission.covered(self._manager.broken())

    async def never_loaded(self, permission: Permission) -> dict[str, str]:
        """As `Manager.never_loaded`, for models that the permission covers."""
        return permission.covered(await self._manager.never_loaded())

    def queue_depth(self) -> int:
        """Return the number of queued requests of all models."""
        return sum(
            version.servable.queue_depth for version in self._registry.versions() if version.servable is not None
        )

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run `work`, which would block the event loop too long, on a thread; returns or raises what it does."""
        return await asyncio.to_thread(work)

    def loaded(self) -> set[tuple[str, int]]:
        """Return the versions in memory: model name and version number."""
        servables = [version.servable for version in self._registry.versions()]
        return {(servable.name, servable.version) for servable in servables if servable is not None}

    def model_ready(self, permission: Permission, name: str, version: str = "") -> bool:
        """Return whether a request for the model would be run, and the server is not stopping.

        Raise `ModelNotFound` or `InvalidArgument`.
        """
        permission.check_model(name)
        return self._registry.is_ready(name, version) and not self.stopping

    async def check_ready(self, permission: Permission, name: str, version: str = "") -> bool:
        """As `model_ready`, and also asks the model's own readiness check."""
        if not self.model_ready(permission, name, version):
            return False
        return await self._registry.servable(name, version).check_ready()

    @property
    def ready(self) -> bool:
        """Whether every model that is to be served is loaded with a live instance, and the server is not
        stopping.
        """
        return not self.stopping and self._registry.all_ready()

    @property
    def stopping(self) -> bool:
        """Whether the server is shutting down."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Make the server not ready, permanently; calls are still served."""
        self._stopped.set()
        self._announce()

    async def sequences_ended(self, at_most: float) -> None:
        """Wait up to `at_most` seconds until no sequence is open; a stopping server starts no new ones."""
        await self._sequences.wait_ended(at_most)

    def _announce(self, _: str | None = None) -> None:
        """Wake all waiters of `readiness_changed`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def readiness_changed(self, at_most: float) -> None:
        """Wait up to `at_most` seconds until readiness may have changed."""
        if self.stopping:
            await asyncio.sleep(at_most)
            return
        # Not wait_for(): in Python 3.11 it loses a cancellation that arrives together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._changed.wait()
