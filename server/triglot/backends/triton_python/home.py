"""What the utilities know of the model whose code uses them, and of the request that it works for."""

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
"""Calls of other models that `async_exec` has in flight at the same time, for one model."""


class Home:
    """One version of a model. `calls`: on whose behalf its code runs, where that is not a request; `modules`: its
    own."""

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
        """The version is going to serve: it has its name, and a way to other models."""
        if call.model_name:
            self.name, self.version = call.model_name, call.model_version
        apart = call.apart()
        apart.model_name, apart.model_version = self.name, self.version
        self.calls = apart

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that wait for other models while a coroutine goes on."""
        with self._making:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MOST_CALLS, f"{self.name}/{self.version} calls")
                self.on_close(partial(self._pool.shutdown, wait=False, cancel_futures=True))
            return self._pool

    def on_close(self, close: Callable[[], object]) -> None:
        """Have `close` called when the model is closed."""
        self._closers.append(close)

    def close(self) -> None:
        """Once; raises what one of them raises."""
        while self._closers:
            self._closers.pop()()


_work: ContextVar[tuple[Home, Call] | None] = ContextVar("triton_python_work", default=None)


@contextmanager
def working(home: Home, call: Call) -> Iterator[None]:
    """Within the block this thread, and what it starts on a loop, works for the call."""
    token, modules = _work.set((home, call)), running.set(home.modules)
    try:
        yield
    finally:
        running.reset(modules)
        _work.reset(token)


def here(home: Home | None) -> Home:
    """The model: `home`, or else the one whose code runs. Raises `TritonModelException` when there is none."""
    work = _work.get()
    if home is None and work is not None:
        home = work[0]
    if home is None:
        raise TritonModelException("can only be called from the code of a loaded Triton Python model")
    return home


def call_of(home: Home | None) -> Call:
    """The call that the code of the model runs for; a call of the model's own where there is none."""
    work = _work.get()
    found = here(home)
    return work[1] if work is not None and work[0] is found else found.calls


def reach(home: Home | None, wanted: ModelCall | ModelTask) -> Any:
    """What `Call.reach` gives. Raises as it does, and `TritonModelException` for a model that no server runs."""
    call = call_of(home)
    if call.reach is no_models:
        raise TritonModelException("cannot call other models before this model is served")
    return call.reach(call, wanted)
