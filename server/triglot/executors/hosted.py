"""Models that run elsewhere than in this process."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from triglot.core.readings import Reading
from triglot.executors.work import Function
from triglot.model.model import Model


def not_at_all(_: Function) -> None:
    """Warms nothing up."""


def nobody_to_tell(_: int, __: int, ___: str) -> None:
    """Tells nobody."""


class HostedModel(Model):
    """A model whose `infer` has the work done by something that can be lost, and comes back.

    `on_change` is called, on any thread, when it becomes alive or not. `looks_at_call`: whether the model's own
    code gets the call. `warm_up` has what comes back run what this version was warmed up with. `loop` is the one
    that it is called on.

    A model of sequences has a place for each instance: `on_lost` is called, on any thread, with the instance's
    number, how often its place has been lost by now, and a name for messages, when it is lost, before any call
    fails for it; what its sequences had there is gone.
    """

    looks_at_call = True
    calls_per_instance = 1
    """Calls of plain code that an instance has at the same time; all but one of them are on their way."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_change: Callable[[], Any] = lambda: None
        self.warm_up: Callable[[Function], object] = not_at_all
        self.on_lost: Callable[[int, int, str], object] = nobody_to_tell

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether something is there to run the next request."""

    @property
    def nodes(self) -> Sequence[str]:
        """The address of the machine of each instance, where that can be another one than the server's."""
        return ()

    @property
    def orphaned(self) -> int:
        """Calls that go on in it though nobody waits for them any more. On the loop."""
        return 0

    @abstractmethod
    def abandon(self) -> None:
        """Its calls have not ended in time: end what runs them. On any thread; `close` follows."""

    def runs_on(self, instance: int, losses: int) -> None:
        """The calling thread is this instance's. If its place is lost more often than that, what it runs next is
        `Unavailable` and runs nowhere else."""

    @abstractmethod
    def readings(self) -> Iterator[Reading]:
        """What it counts."""


def calls_per_instance(model: Model) -> int:
    """How many threads call each instance of a model of plain code."""
    return model.calls_per_instance if isinstance(model, HostedModel) else 1
