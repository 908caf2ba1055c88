"""A shadow on another server, by KServe V2 over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot.core.call import Call
from triglot.core.errors import FailedPrecondition, as_serving_error
from triglot.core.running import Sink
from triglot.core.tensor import datatype_of
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.model.validation import bind_inputs
from triglot.protocols.traffic.shadow import Copy
from triglot.repository.config.traffic import Shadow

if TYPE_CHECKING:
    from triglot.client import AsyncClient


class Remote:
    """Runs copies on the server of a shadow's address. On the event loop."""

    def __init__(self, shadow: Shadow, model: str) -> None:
        self._shadow = shadow
        self._model = model
        self._client: AsyncClient | None = None
        self._running: set[asyncio.Task[None]] = set()

    def run(self, copy: Copy, call: Call, sink: Sink) -> None:
        """Start a copy. Raise `ServingError`, and `ImportError` without gRPC's library."""
        self._client = client = self._client or _connected(self._shadow)
        request = copy.request
        signature = request.signature_name or copy.servable.default_signature
        inputs = bind_inputs(copy.servable.signatures[signature], request)

        async def infer() -> None:
            try:
                outputs = await client.infer(
                    self._model,
                    inputs,
                    version=self._shadow.version,
                    signature=request.signature_name,
                    outputs=request.outputs,
                    parameters=request.parameters,
                    request_id=request.id,
                    timeout=call.remaining,
                )
            except Exception as error:  # Whatever it is, the copy has ended.
                sink.end(as_serving_error(error, "the copy"))
                return
            tensors = [OutputTensor(name, datatype_of(array), array) for name, array in outputs.items()]
            sink.send(InferenceResponse(self._model, outputs.model_version, "", tensors))
            sink.end(None)

        self._start(infer())

    def close(self) -> None:
        """Close the connection once its copies have ended."""
        if self._client is not None:
            self._start(_close(self._client, list(self._running)))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def _close(client: AsyncClient, running: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*running, return_exceptions=True)
    await client.close()


def _connected(shadow: Shadow) -> AsyncClient:
    """Return a client of a shadow's server. Raise `ServingError` for certificates that cannot be used."""
    from triglot.client import AsyncClient, Retries, Tls  # noqa: PLC0415 - few servers have such a shadow.

    try:
        tls = None if shadow.tls is None else Tls(**{name: Path(file) for name, file in shadow.tls.items()})
        token = partial(_token, Path(shadow.token_file)) if shadow.token_file else ""
        return AsyncClient(shadow.address, tls=tls, token=token, retries=Retries(attempts=1))
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"shadow {shadow.address}: {error}") from error


def _token(file: Path) -> str:
    """Return the token in a file, which may be replaced at any time. Raise `ServingError`."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(f"shadow: token_file: {error}") from error
