"""What every protocol calls: one way to run a model and to ask about it, whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from triglot.core.call import Call, Reach, no_models
from triglot.core.errors import ServingError, Unavailable, Unimplemented, as_serving_error
from triglot.core.permission import Permission
from triglot.core.running import Defer, Done, raise_error
from triglot.core.tensor import Array
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.control import LOAD_MODEL, RELOAD, UNLOAD_MODEL, Arguments, Control
from triglot.dataplane.inference import Inference, admit, bind, ended, response_of, takes_long
from triglot.dataplane.recorder import Recorder
from triglot.model.metadata import ModelMetadata
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs
from triglot.repository.config.completed import Loaded
from triglot.repository.config.model_config import parse_override
from triglot.repository.config.settings import ModelSettings, settings_fields, settings_of
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.plan import Version
from triglot.repository.manager.sequences import SequenceRoutes
from triglot.scheduling.response_cache import OFF_LOOP_BYTES, Key, ModelCache
from triglot.scheduling.servable import Servable
from triglot.telemetry.tracing import Tracer

T = TypeVar("T")


class Decoupled(Unimplemented):
    """The model answers with a stream, the call takes one answer."""


class DataPlane:
    """Finds the servable, validates the request against its signature, runs it, checks what it answers.

    What is given a model's name is given the caller's permission, too, or its call: a name that is not covered
    raises `PermissionDenied`, whether there is such a model or not. Lists have what is covered.
    """

    def __init__(
        self,
        manager: Manager,
        *,
        default_timeout: float = 0.0,
        tracer: Tracer | None = None,
        recorder: Recorder | None = None,
        control: Control | None = None,
    ) -> None:
        self.reach: Reach = no_models
        """What `Call.infer` does; see `ModelCalls`."""
        self.tracer = tracer or Tracer()
        self.recorder = recorder or Recorder()
        self.control = control or Control()
        self._manager = manager
        self._registry = manager.registry
        self._sequences = SequenceRoutes(self._registry)
        self._default_timeout = default_timeout
        self._default_source = f"the server's default_timeout of {default_timeout:g} seconds"
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()
        self._registry.on_change = self._announce
        self.control.register_action(LOAD_MODEL, self._load)
        self.control.register_action(UNLOAD_MODEL, self._unload)
        self.control.register_action(RELOAD, self._reload)

    def servable(self, permission: Permission, name: str, version: str = "", label: str = "") -> Servable:
        """The version that a request goes to; a `with` block is a lease of it.

        Raises `ModelNotFound`, `InvalidArgument` for a bad version or an unknown label, and `Unavailable`.
        """
        permission.check_model(name)
        return self._registry.servable(name, version, label)

    def servable_of(self, permission: Permission, request: InferenceRequest) -> Servable:
        """The version that the request goes to: where its sequence lives, if it goes on with one."""
        permission.check_model(request.model_name)
        if request.parameters and (holder := self._sequences.find(request)) is not None:
            return holder
        return self._registry.servable(request.model_name, request.model_version)

    async def infer(self, request: InferenceRequest, call: Call) -> InferenceResponse:
        """One answer to one request.

        Raises `ServingError`: unknown model, a request that does not fit, a full queue, the model's own.
        `Decoupled` when the model answers with a stream.
        """
        call.model_name = request.model_name
        with self.servable_of(call.permission, request) as servable:
            return await self.infer_on(servable, request, call)

    async def infer_on(self, servable: Servable, request: InferenceRequest, call: Call) -> InferenceResponse:
        """As `infer`, on a version that the caller holds a lease of."""
        inference: Inference = await ended(partial(self.submit, servable, request, call, leased=True))
        raise_error(inference)
        response: InferenceResponse = inference.answer
        return response

    def submit(
        self,
        servable: Servable,
        request: InferenceRequest | None,
        call: Call,
        done: Done,
        defer: Defer | None = None,
        *,
        leased: bool = False,
    ) -> Inference:
        """Run one request on this version: the only way to the model for requests with one answer.

        `done` is called with the `Inference`, maybe before this returns. `request` is None for a model that takes
        messages, which finds one in `call.exchange`. `defer`: see `Schedule.put`. `leased`: the caller holds a
        lease until then.
        """
        inference = Inference(servable, request, call, done, defer)
        inference.leased = leased
        try:
            if self.tracer.on:
                inference.trace = self.tracer.begin(servable.name, servable.version, call, request)
            if self.recorder.on and request is not None:
                inference.record = self.recorder.begin(servable, request, call)
            self.begin(servable, call)
            if request is not None:
                if servable.decoupled:
                    raise Decoupled("the model returns a stream of responses")
                signature = inference.signature = admit(servable, request, call)
                if servable.sequences is not None or (signature.takes_bytes and takes_long(request)):
                    self._submit_later(inference, request)
                    return inference
                began = perf_counter()
                inference.inputs = bind_inputs(signature, request)
                call.times.input_seconds += perf_counter() - began
                if servable.answers is not None:
                    if call.size > OFF_LOOP_BYTES or servable.answers.digests_long(inference.inputs):
                        self._submit_later(inference, request)
                        return inference
                    if self._is_kept(inference, servable.answers, request):
                        return inference
        except Exception as error:
            inference.reject(as_serving_error(error, str(servable)))
            return inference
        servable.submit(inference)
        return inference

    def _submit_later(self, inference: Inference, request: InferenceRequest) -> None:
        """Of a request whose inputs take long to bind or to digest, or that belongs to a sequence."""
        lease = inference.servable.__enter__()

        def ended(task: asyncio.Task[None]) -> None:
            if not inference.over and inference.task is task:
                inference.leave()
            lease.__exit__()

        task = inference.task = self._loop.create_task(self._prepare(inference, request))
        task.add_done_callback(ended)

    async def _prepare(self, inference: Inference, request: InferenceRequest) -> None:
        servable = inference.servable
        try:
            if not inference.inputs:
                began = perf_counter()
                inference.inputs = await self._bound(servable, inference.signature, request, inference.call)
                inference.call.times.input_seconds += perf_counter() - began
            if (cache := servable.answers) is not None:
                began = perf_counter()
                key = await asyncio.to_thread(cache.key, inference.inputs, inference.call, request)
                if self._is_kept(inference, cache, request, key, began):
                    return
        except asyncio.CancelledError:
            return  # Raised, the task would keep it; its frames hold the inference, which has the task.
        except Exception as error:
            inference.reject(as_serving_error(error, str(servable)))
            return
        inference.task = inference.defer = None  # What it came together with has begun long ago.
        servable.submit(inference)

    def _is_kept(
        self,
        inference: Inference,
        cache: ModelCache,
        request: InferenceRequest,
        key: Key | None = None,
        began: float = 0.0,
    ) -> bool:
        """Whether the response cache has the answer, which then is the outcome; else it is to keep the new one."""
        call = inference.call
        began = began or perf_counter()
        inference.cache_key = key = key or cache.key(inference.inputs, call, request)
        kept = cache.find(key)
        call.times.cache_hit, call.times.cache_seconds = kept is not None, perf_counter() - began
        if kept is None:
            return False
        inference.accept(InferenceResponse(call.model_name, str(call.model_version), request.id, kept))
        return True

    async def infer_stream(self, request: InferenceRequest, call: Call) -> AsyncGenerator[InferenceResponse, None]:
        """The answers as the model gives them; raises as `infer`. Closing the generator stops the model."""
        call.model_name = request.model_name
        with self.servable_of(call.permission, request) as servable:
            async with aclosing(await self.infer_stream_on(servable, request, call)) as responses:
                async for response in responses:
                    yield response

    async def infer_stream_on(
        self, servable: Servable, request: InferenceRequest, call: Call
    ) -> AsyncGenerator[InferenceResponse, None]:
        """As `infer_stream`, on a version that the caller holds a lease of.

        A model that is not decoupled gives one answer.
        """
        record = self.recorder.begin(servable, request, call) if self.recorder.on else None
        if self.tracer.on and (trace := self.tracer.begin(servable.name, servable.version, call, request)):
            answers = await trace.opened(self._open_stream(servable, request, call))
        else:
            answers = await self._open_stream(servable, request, call)
        return answers if record is None else record.each(answers)

    async def _open_stream(
        self, servable: Servable, request: InferenceRequest, call: Call
    ) -> AsyncGenerator[InferenceResponse, None]:
        self.begin(servable, call)
        signature = admit(servable, request, call)
        began = perf_counter()
        inputs = await self._bound(servable, signature, request, call)
        call.times.input_seconds += perf_counter() - began
        return servable.stream(inputs, call, partial(response_of, servable, signature, request))

    def exchange_stream_on(self, servable: Servable, call: Call) -> AsyncGenerator[Any, None]:
        """What such a model answers with, one by one. Closing the generator stops the model."""
        trace = self.tracer.begin(servable.name, servable.version, call) if self.tracer.on else None
        self.begin(servable, call)
        answers = servable.stream({}, call)
        return answers if trace is None else trace.each(answers)

    async def _bound(
        self, servable: Servable, signature: Signature, request: InferenceRequest, call: Call
    ) -> dict[str, Array]:
        """The inputs; a request that starts a sequence is let into it here."""
        if servable.sequences is None:
            return await bind(signature, request)
        # Requests of a sequence are not to overtake each other on a thread.
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
        """The call learns where it goes, for the telemetry, and when it ends at the latest."""
        call.model_name, call.model_version = servable.name, servable.version
        if call.counted:
            call.statistics = servable.statistics
        if call.reach is no_models:  # Else a model calls, which knows who called it.
            call.reach = self.reach
        # A warm-up may take as long as it takes; what a model asks of another ends with its own call.
        if self._default_timeout and call.deadline is None and call.size:
            call.limit(self._default_timeout, self._default_source)

    def metadata(self, permission: Permission, name: str, version: str = "") -> ModelMetadata:
        """Raises `ModelNotFound`, `InvalidArgument` for a bad version and `Unavailable` for one not ready."""
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
        )

    def serving(self, permission: Permission) -> list[ModelMetadata]:
        """What the models that serve say of themselves."""
        names = self.model_names(permission)
        return [self.metadata(permission, name) for name in names if self.model_ready(permission, name)]

    def loaded_from(self, permission: Permission, name: str, version: str = "") -> Loaded:
        """What a version is made of, for its configuration. Raises as `metadata`."""
        return self._manager.loaded(self.servable(permission, name, version))

    def knows(self, permission: Permission, name: str) -> bool:
        """Whether the model is wanted, ready or not; for others than whom it is for it is unknown."""
        return permission.covers(name) and self._registry.knows(name)

    def first_version(self, permission: Permission, name: str) -> str:
        """The version of this model that its configuration names first; "" where none lists them one by one."""
        permission.check_model(name)
        return self._manager.first_version(name)

    def model_names(self, permission: Permission) -> list[str]:
        """Every model that is wanted, ready or not; not what was unloaded."""
        return list(filter(permission.covers, self._registry.served()))

    def known_names(self, permission: Permission) -> list[str]:
        """As `model_names`, and what was unloaded."""
        return list(filter(permission.covers, self._registry.names()))

    def versions(self, permission: Permission) -> list[Version]:
        """Every version that is wanted or still there, those of unloaded models too."""
        return [version for version in self._registry.versions() if permission.covers(version.files.name)]

    def labelled(self, permission: Permission, name: str, label: str) -> int:
        """The version that a label names, available or not. Raises `UnknownLabel`."""
        permission.check_model(name)
        return self._registry.labelled(name, label)

    def labels_of(self, permission: Permission, name: str) -> dict[str, int]:
        """The version that each label of a model names; none of an unknown model."""
        permission.check_model(name)
        return self._registry.labels_of(name)

    def statuses(self, permission: Permission, name: str) -> list[Version]:
        """Every version of a model that is remembered, ended ones too, highest first. Raises `ModelNotFound`."""
        permission.check_model(name)
        return self._registry.statuses(name)

    def platforms(self, permission: Permission) -> dict[str, str]:
        """What the configuration calls the kind of each model that it names."""
        return permission.covered(self._manager.platforms())

    async def reload(self, permission: Permission, models: Sequence[ModelSettings]) -> None:
        """Serve these models, and no others: for whom all are.

        Raises `ServingError` as `Manager.check_folders` and `reload`.
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
        """Load a model, or load it again. Raises `ServingError` as `Manager.load_model`.

        `files`: only where the server is one process. What a `config` makes an ensemble of has to be covered, too.
        """
        permission.check_model(name)
        if config is not None and not permission.covers_all:
            # An ensemble calls its models on nobody's behalf.
            message = await self.off_loop(partial(parse_override, config, name))
            for step in message.ensemble_scheduling.step:
                permission.check_model(step.model_name)
        sent = {"files": files} if files else {}
        await self.control.act(LOAD_MODEL, {"name": name, "config": config, **sent})

    async def _load(self, arguments: Arguments) -> bool:
        """A server that stops does not wait for a load to end: `Unavailable`."""
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
        """Raises as `Manager.unload_model`."""
        permission.check_model(name)
        await self.control.act(UNLOAD_MODEL, {"name": name, "dependents": dependents})

    async def _unload(self, arguments: Arguments) -> None:
        self._manager.unload_model(arguments["name"], dependents=arguments["dependents"])

    def broken(self, permission: Permission) -> dict[str, ServingError]:
        """What is wrong with those wanted models of which there is no version at all."""
        return permission.covered(self._manager.broken())

    async def never_loaded(self, permission: Permission) -> dict[str, str]:
        """See `Manager.never_loaded`."""
        return permission.covered(await self._manager.never_loaded())

    def queue_depth(self) -> int:
        """Requests that wait, of all models."""
        return sum(
            version.servable.queue_depth for version in self._registry.versions() if version.servable is not None
        )

    async def off_loop(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; it is too much for the event loop."""
        return await asyncio.to_thread(work)

    def loaded(self) -> set[tuple[str, int]]:
        """The versions that are in memory, by model and number."""
        servables = [version.servable for version in self._registry.versions()]
        return {(one.name, one.version) for one in servables if one is not None}

    def model_ready(self, permission: Permission, name: str, version: str = "") -> bool:
        """Whether a request for it would be run, and the server is not stopping.

        Raises `ModelNotFound` or `InvalidArgument`.
        """
        permission.check_model(name)
        return self._registry.is_ready(name, version) and not self.stopping

    async def check_ready(self, permission: Permission, name: str, version: str = "") -> bool:
        """As `model_ready`, and by what the model's own code says."""
        if not self.model_ready(permission, name, version):
            return False
        return await self._registry.servable(name, version).check_ready()

    @property
    def ready(self) -> bool:
        """Whether every wanted model is loaded and has a live instance, and the server is not stopping."""
        return not self.stopping and self._registry.all_ready()

    @property
    def stopping(self) -> bool:
        """Whether the server is about to end."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Turn readiness off, for good; calls still run."""
        self._stopped.set()
        self._announce()

    async def sequences_ended(self, at_most: float) -> None:
        """Wait until no sequence lives any more, `at_most` seconds; a server that stops begins none."""
        await self._sequences.ended(at_most)

    def _announce(self) -> None:
        """Wake who waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def readiness_changed(self, at_most: float) -> None:
        """Wait until readiness may have changed, `at_most` seconds."""
        if self.stopping:
            await asyncio.sleep(at_most)
            return
        # Not wait_for(): Python 3.11's forgets a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._changed.wait()
