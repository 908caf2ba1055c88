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

MOST_CALLS = 64
"""Limit on concurrent calls of `async_exec` to other models, per model."""


class Home:
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
        self._making = threading.Lock()

    def begin(self, call: Call) -> None:
        """Sets the served name and version, and the way to other models, before the version serves."""
        if call.model_name:
            self.name, self.version = call.model_name, call.model_version
        apart = call.apart()
        apart.model_name, apart.model_version = self.name, self.version
        self.calls = apart

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that wait for other models while a coroutine continues."""
        with self._making:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MOST_CALLS, f"{self.name}/{self.version} calls")
                self.on_close(partial(self._pool.shutdown, wait=False, cancel_futures=True))
            return self._pool

    def on_close(self, close: Callable[[], object]) -> None:
        """Registers a callback for when the model is closed."""
        self._closers.append(close)

    def close(self) -> None:
        """Calls the callbacks, once; raises their exceptions."""
        while self._closers:
            self._closers.pop()()


_work: ContextVar[tuple[Home, Call] | None] = ContextVar("triton_python_work", default=None)


@contextmanager
def working(home: Home, call: Call) -> Iterator[None]:
    """Sets the model and call that this thread, and what it starts on a loop, works for in the block."""
    token, modules = _work.set((home, call)), running.set(home.modules)
    try:
        yield
    finally:
        running.reset(modules)
        _work.reset(token)


def here(home: Home | None) -> Home:
    """Returns `home`, or else the model whose code is running. Raises `TritonModelException` without any."""
    work = _work.get()
    if home is None and work is not None:
        home = work[0]
    if home is None:
        raise TritonModelException("can only be called from the code of a loaded Triton Python model")
    return home


def call_of(home: Home | None) -> Call:
    """Returns the call that the model's code is running for; outside of requests the model's own one."""
    work = _work.get()
    found = here(home)
    return work[1] if work is not None and work[0] is found else found.calls


def reach(home: Home | None, wanted: ModelCall | ModelTask) -> Any:
    """Returns what `Call.reach` does. Raises its errors, and `TritonModelException` before the model serves."""
    call = call_of(home)
    if call.reach is no_models:
        raise TritonModelException("cannot call other models before this model is served")
    return call.reach(call, wanted)
