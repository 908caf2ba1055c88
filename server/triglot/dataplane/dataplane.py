"""The data plane: the one way in which every protocol runs models, inspects them and controls them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from triglot.core.awaiting import Responses
from triglot.core.call import Call
from triglot.core.errors import ServingError, Unavailable
from triglot.core.operation import Permission
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.control import LOAD_MODEL, RELOAD, UNLOAD_MODEL, Arguments, Control
from triglot.dataplane.request_path import RequestPath
from triglot.model.signature import ModelMetadata
from triglot.repository.config.completed import Loaded
from triglot.repository.config.model_config import parse_override
from triglot.repository.config.settings import ModelSettings, settings_fields, settings_of
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.plan import Version
from triglot.repository.manager.registry import Registry
from triglot.scheduling.servable import Servable
from triglot.telemetry.tracing import Tracer

T = TypeVar("T")


class DataPlane(RequestPath):
    """Runs models, inspects them and controls them.

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
        strict_readiness: bool = True,
    ) -> None:
        super().__init__(manager, default_timeout, tracer)
        self._strict_readiness = strict_readiness
        self.control = control or Control()
        self._changed = asyncio.Event()
        self._registry.changes.subscribe(self._announce)
        self.control.register_action(LOAD_MODEL, self._load)
        self.control.register_action(UNLOAD_MODEL, self._unload)
        self.control.register_action(RELOAD, self._reload)

    @property
    def registry(self) -> Registry:
        """The versions of all models."""
        return self._registry

    async def infer(self, request: InferenceRequest, call: Call) -> InferenceResponse:
        """Return the response to one request.

        Raise `ServingError`: unknown model, invalid request, full queue, an error of the model; and
        `Decoupled` when the model returns a stream.
        """
        call.model_name = request.model_name
        with self.servable_of(call, request) as servable:
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
        servable = self.servable_of(call, request)
        return Responses(partial(self.start, servable, request, call, streams=True))

    def infer_stream_on(self, servable: Servable, request: InferenceRequest | None, call: Call) -> Responses:
        """Return the responses of the model, for a version on which the caller holds a lease; to be closed.

        They raise as `infer`. A model that is not decoupled gives one. `request`: see `start`.
        """
        return Responses(partial(self.start, servable, request, call, leased=True, streams=True))

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
            servable.model.columns,
            servable.model.example,
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
        """Whether every model that is to be served is loaded with a live instance, unless readiness is not strict,
        and the server is not stopping.
        """
        return not self.stopping and (not self._strict_readiness or self._registry.all_ready())

    def stop(self) -> None:
        """Make the server not ready, permanently; calls are still served."""
        self._stopped.set()
        self._announce()

    async def sequences_ended(self, at_most: float) -> None:
        """Wait up to `at_most` seconds until no sequence is open; a stopping server starts no new ones."""
        await self.sequences.wait_ended(at_most)

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
