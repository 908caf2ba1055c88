"""Calls of a model to other models, `exec` and `async_exec`, and to the model repository (spec 5.3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any, Self, TypeVar

from triglot.backends.triton_python.context import ModelContext, current_model, reach
from triglot.backends.triton_python.errors import TritonModelException, text
from triglot.backends.triton_python.response import InferenceResponse
from triglot.core.call import ModelCall, ModelTask
from triglot.core.errors import ServingError

T = TypeVar("T")


def run(context: ModelContext | None, call: ModelCall) -> Any:
    """Execute the call and return its response or responses. Callable on any thread."""
    return _off_loop(context, lambda: _run(context, call))


def start(context: ModelContext | None, call: ModelCall) -> Awaitable[Any]:
    """As `run`, awaitable, for code on a loop of the model's own."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise TritonModelException(
            "async_exec: expected a call from an async function, got one from a plain function"
        ) from None
    return loop.run_in_executor(current_model(context).pool, copy_context().run, _run, context, call)


def _run(context: ModelContext | None, call: ModelCall) -> Any:
    if call.stream:
        return ResponseIterator(context, reach(context, call))
    try:
        return InferenceResponse.of(reach(context, call))
    except ServingError as error:
        return InferenceResponse.failed(error)


def _off_loop(context: ModelContext | None, work: Callable[[], T]) -> T:
    """Run `work` on this thread, or in the pool if a loop runs here, as `Call.reach` must not block a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    return current_model(context).pool.submit(copy_context().run, work).result()


class ResponseIterator:
    """The responses of a decoupled model, one by one; an error is the last of them.

    The constructor waits for the first response, as in Triton: so a coroutine that awaits `async_exec` and then
    iterates blocks its loop only for further responses.
    """

    def __init__(self, context: ModelContext | None, responses: Generator[Mapping[str, Any], None, None]) -> None:
        self._context = context
        self._responses = responses
        self._has_ended = False
        self._first = self._next()

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        response = self._take_first()
        if response is None and not self._has_ended:
            response = _off_loop(self._context, self._next)
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        response = self._take_first()
        if response is None:
            pool = current_model(self._context).pool
            response = await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, self._next)
        if response is None:
            raise StopAsyncIteration
        return response

    def _take_first(self) -> InferenceResponse | None:
        first, self._first = self._first, None
        return first

    def _next(self) -> InferenceResponse | None:
        try:
            response = None if self._has_ended else next(self._responses, None)
        except ServingError as error:
            self._has_ended = True
            return InferenceResponse.failed(error)
        if response is None:
            self._has_ended = True
            return None
        return InferenceResponse.of(response)

    def cancel(self) -> None:
        """Cancel the other model's execution."""
        self._has_ended, self._first = True, None
        with suppress(ValueError):  # Another thread is waiting for a response, which will be the last one.
            self._responses.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


# --- model repository ---


def is_model_ready(context: ModelContext | None, model_name: str | bytes, model_version: str = "") -> bool:
    """Whether the server has that model, and it is ready."""
    version = str(model_version)
    return bool(
        _managed(context, ModelTask("ready", _named(model_name), "" if version in ("", "-1") else version))
    )


def load_model(
    context: ModelContext | None,
    model_name: str | bytes,
    files: Mapping[str, bytes] | None = None,
    config: str | None = None,
) -> None:
    """Load or reloads a model, with the JSON `config` if given.

    Raise `TritonModelException` if the server does not allow loading models, and for `files`.
    """
    if files:
        raise TritonModelException("load_model: files: not supported; models are loaded from the repository only")
    _managed(context, ModelTask("load", _named(model_name), config=config))


def unload_model(context: ModelContext | None, model_name: str | bytes, unload_dependents: bool = False) -> None:
    """Unloads a model. Raise `TritonModelException` if the server does not allow unloading models."""
    _managed(context, ModelTask("unload", _named(model_name), dependents=unload_dependents))


def _named(model: str | bytes) -> str:
    return text(model, "model_name")


def _managed(context: ModelContext | None, task: ModelTask) -> Any:
    try:
        return _off_loop(context, lambda: reach(context, task))
    except ServingError as error:
        raise TritonModelException(error.message) from None


def get_model_dir(context: ModelContext | None) -> str:
    """Return the folder of the model's version."""
    return str(Path(current_model(context).folder).absolute())
