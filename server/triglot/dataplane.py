"""What every protocol calls: one way to run a model and to ask about it, whoever asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from triglot.core.errors import Internal, Unimplemented
from triglot.core.tensor import Array
from triglot.core.types import Call, InferenceRequest, InferenceResponse
from triglot.core.validation import Signature, bind_inputs, bind_outputs, check_requested_outputs
from triglot.engine.servable import Servable
from triglot.repository.manager import Manager, Version

log = logging.getLogger(__name__)

LONG_BYTES = 64 * 1024
"""BYTES tensors of this length and more are taken apart on a thread."""


class Decoupled(Unimplemented):
    """The model answers with a stream, the call takes one answer."""


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model says of itself. `versions` are those that serve, or the one that was asked for."""

    name: str
    versions: list[str]
    platform: str
    signature: Signature
    decoupled: bool


class DataPlane:
    """Finds the servable, validates the request against its signature, runs it, checks what it answers."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.stopping = False
        self._changed = asyncio.Event()

    async def infer(self, request: InferenceRequest, call: Call) -> InferenceResponse:
        """One answer to one request.

        Raises `ServingError`: unknown model, a request that does not fit, a full queue, the model's own.
        `Decoupled` when the model answers with a stream.
        """
        with self._manager.servable(request.model_name, request.model_version) as servable:
            if servable.decoupled:
                raise Decoupled("the model answers with a stream of responses")
            signature = servable.signature
            _admit(signature, request, call)
            inputs = (
                await _bind_bytes(signature, request) if signature.takes_bytes else bind_inputs(signature, request)
            )
            return _response(servable, request, await servable.infer(inputs, call))

    async def infer_stream(self, request: InferenceRequest, call: Call) -> AsyncGenerator[InferenceResponse, None]:
        """The answers as the model gives them; raises as `infer`. Closing the generator stops the model."""
        with self._manager.servable(request.model_name, request.model_version) as servable:
            signature = servable.signature
            _admit(signature, request, call)
            inputs = (
                await _bind_bytes(signature, request) if signature.takes_bytes else bind_inputs(signature, request)
            )
            async with aclosing(servable.stream(inputs, call)) as answers:
                async for answer in answers:
                    yield _response(servable, request, answer)

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Raises `ModelNotFound`, `InvalidArgument` for a bad version and `Unavailable` for one not ready."""
        servable = self._manager.servable(name, version)
        numbers = [servable.version] if version else self._manager.ready_versions(name)
        return ModelMetadata(
            name,
            [str(number) for number in numbers],
            servable.platform,
            servable.signature,
            servable.decoupled,
        )

    def decoupled(self, name: str, version: str = "") -> bool:
        """Whether the model answers with a stream. Raises as `metadata`."""
        return self._manager.servable(name, version).decoupled

    def model_names(self) -> list[str]:
        """Every model that is wanted, ready or not."""
        return self._manager.names()

    def versions(self) -> list[Version]:
        """Every version of every wanted model."""
        return list(self._manager.versions())

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a request for it would be run, and the server is not stopping.

        Raises `ModelNotFound` or `InvalidArgument`.
        """
        return self._manager.is_ready(name, version) and not self.stopping

    @property
    def ready(self) -> bool:
        """Whether every wanted model is loaded and has a live instance, and the server is not stopping."""
        return not self.stopping and self._manager.all_ready()

    def stop(self) -> None:
        """Turn readiness off, for good; calls still run."""
        self.stopping = True
        self._changed.set()

    async def readiness_changed(self, at_most: float) -> None:
        """Wait until readiness may have changed, `at_most` seconds."""
        if self.stopping:
            await asyncio.sleep(at_most)
            return
        # Not wait_for(): Python 3.11's forgets a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._changed.wait()


def _admit(signature: Signature, request: InferenceRequest, call: Call) -> None:
    """The call learns what the model may ask about it. Raises `InvalidRequest` for outputs that do not exist."""
    if request.outputs:
        check_requested_outputs(signature, request)
    call.request_id = request.id
    call.parameters = request.parameters


async def _bind_bytes(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """`bind_inputs` looks at BYTES elements one by one, and many of them are too much for the loop."""
    if sum([len(one.data) for one in request.inputs]) > LONG_BYTES:
        return await asyncio.to_thread(bind_inputs, signature, request)
    return bind_inputs(signature, request)


def _response(servable: Servable, request: InferenceRequest, answer: object) -> InferenceResponse:
    try:
        outputs = bind_outputs(servable.signature, answer, request.outputs, servable.name)
    except Internal as error:
        log.error("%s", error.message)
        raise
    return InferenceResponse(servable.name, str(servable.version), request.id, outputs)
