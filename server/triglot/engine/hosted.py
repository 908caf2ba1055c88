"""Models that run elsewhere than in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from triglot.core.model import Model
from triglot.core.readings import Reading
from triglot.engine.work import Function


def not_at_all(_: Function) -> None:
    """Warms nothing up."""


class HostedModel(Model):
    """A model whose `infer` has the work done by something that can be lost, and comes back.

    `on_change` is called, on any thread, when it becomes alive or not. `looks_at_call`: whether the model's own
    code gets the call. `warm_up` has what comes back run what this version was warmed up with.
    """

    looks_at_call = True

    def __init__(self) -> None:
        self.on_change: Callable[[], Any] = lambda: None
        self.warm_up: Callable[[Function], object] = not_at_all

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether something is there to run the next request."""

    @abstractmethod
    def abandon(self) -> None:
        """Its calls have not ended in time: end what runs them. On any thread; `close` follows."""

    @abstractmethod
    def readings(self) -> Iterator[Reading]:
        """What it counts."""
