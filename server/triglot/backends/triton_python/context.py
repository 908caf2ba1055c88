"""The model and the request that a Triton Python model's code runs for, as the utility module sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from triglot.backends.model_modules import ModelModules, running
from triglot.backends.triton_python.errors import TritonModelException
from triglot.core.call import Call, ModelCall, ModelTask, no_models
from triglot.model.metrics import ModelMetrics

MAX_CALLS = 64
"""Limit on concurrent calls of `async_exec` to other models, per model."""


class ModelContext:
    """One version of a model, shared by its instances.

    `calls`: the call that its code runs for outside of requests. `modules`: its own Python modules.
    """

    modules: ModelModules | None = None

    def __init__(self, name: str, version: int, folder: Path) -> None:
        self.name = name
        self.version = version
        self.folder = folder
        self.calls = Call()
        self.metrics = ModelMetrics()
        self._closers: list[Callable[[], object]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def start_serving(self, call: Call) -> None:
        """Set the served name and version, and the way to other models, before the version serves."""
        if call.model_name:
            self.name, self.version = call.model_name, call.model_version
        own_call = call.detached()
        own_call.model_name, own_call.model_version = self.name, self.version
        self.calls = own_call

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that wait for other models while a coroutine continues."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_CALLS, f"{self.name}/{self.version} calls")
                self.on_close(partial(self._pool.shutdown, wait=False, cancel_futures=True))
            return self._pool

    def on_close(self, close: Callable[[], object]) -> None:
        """Register a callback for when the model is closed."""
        self._closers.append(close)

    def close(self) -> None:
        """Call the callbacks, once; raise their exceptions."""
        while self._closers:
            self._closers.pop()()


_current: ContextVar[tuple[ModelContext, Call] | None] = ContextVar("triton_python_work", default=None)


@contextmanager
def working_for(context: ModelContext, call: Call) -> Iterator[None]:
    """Set the model and call that this thread, and what it starts on a loop, works for in the block."""
    token, modules = _current.set((context, call)), running.set(context.modules)
    try:
        yield
    finally:
        running.reset(modules)
        _current.reset(token)


def current_model(context: ModelContext | None) -> ModelContext:
    """Return `context`, or else the model whose code is running. Raise `TritonModelException` without any."""
    current = _current.get()
    if context is None and current is not None:
        context = current[0]
    if context is None:
        raise TritonModelException("can only be called from the code of a loaded Triton Python model")
    return context


def call_of(context: ModelContext | None) -> Call:
    """Return the call that the model's code is running for; outside of requests the model's own one."""
    current = _current.get()
    model = current_model(context)
    return current[1] if current is not None and current[0] is model else model.calls


def reach(context: ModelContext | None, request: ModelCall | ModelTask) -> Any:
    """Return what `Call.reach` does. Raise its errors, and `TritonModelException` before the model serves."""
    call = call_of(context)
    if call.reach is no_models:
        raise TritonModelException("cannot call other models before this model is served")
    return call.reach(call, request)
