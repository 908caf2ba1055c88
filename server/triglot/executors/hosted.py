"""`HostedModel`, the base class of models whose instances run outside of the server's process."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from triglot.core.statistics import Reading
from triglot.executors.work import Function
from triglot.model.model import Model


def no_warm_up(_: Function) -> None:
    """Do nothing: the default of `HostedModel.warm_up`."""


def ignore_loss(_: int, __: int, ___: str) -> None:
    """Do nothing: the default of `HostedModel.on_lost`."""


class ModelFailure(Exception):
    """An exception of a model's code outside of the server's process; its cause has the trace from there."""


class HostedModel(Model):
    """A model whose `infer` is executed by processes or actors, which can be lost and are then replaced.

    `on_change` is called, on any thread, when `alive` changes. `looks_at_call`: whether the model's own code gets
    the call. `warm_up` is called with the function of each replacement, to repeat the version's warm-up there.
    `loop` is the event loop of the server, on which the model is called.

    For models with sequences, which have a process for each instance: `on_lost` is called, on any thread, when an
    instance's process is lost, before any call fails because of that, with the instance's number, the number of
    losses so far, and a name for messages. The state of the instance's sequences is lost, too.
    """

    looks_at_call = True
    calls_per_instance = 1
    """Calls of plain (not `async def`) code that are sent to an instance at a time; all but one are in flight."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_change: Callable[[], Any] = lambda: None
        self.warm_up: Callable[[Function], object] = no_warm_up
        self.on_lost: Callable[[int, int, str], object] = ignore_loss

    @abstractmethod
    def start(self) -> None:
        """Start all instances, and wait until they are loaded; before the first call. Raise `ModelLoadError`."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether an instance is there to run the next request."""

    @property
    def nodes(self) -> Sequence[str]:
        """Address of each instance's machine; empty for models that always run on the server's machine."""
        return ()

    @property
    def pids(self) -> Sequence[int]:
        """Ids of its processes on this machine."""
        return ()

    @property
    def orphaned(self) -> int:
        """Number of calls that still run though their callers no longer wait for them. On the event loop."""
        return 0

    @abstractmethod
    def abandon(self) -> None:
        """End the processes whose calls have not ended in time. On any thread; `close` follows."""

    @abstractmethod
    def functions(self) -> Sequence[Function]:
        """Return a function for each instance that is there: it runs the model on it, and blocks."""

    def runs_on(self, instance: int, losses: int) -> None:
        """Bind the calling thread to an instance, whose process had been lost `losses` times.

        If it has been lost again since, the thread's next calls raise `Unavailable`: they run on no other process.
        """

    @abstractmethod
    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of its processes."""


def calls_per_instance(model: Model) -> int:
    """Return how many threads call each instance of a model with plain (not `async def`) code."""
    return model.calls_per_instance if isinstance(model, HostedModel) else 1
