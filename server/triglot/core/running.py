"""The convention for work with one response or many: a `Sink` takes them, a `Running` gives them.

Strategy: the caller that wants responses starts the work with a `Sink`, and gets a `Running`, on the event
loop. Work with one response is a stream of one. Nothing awaits: a coroutine for each call would cost as much
as running a small model.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import Cancelled, ServingError

Defer = Callable[[Callable[[], None]], object]
"""Runs a function soon, on the event loop, as `call_soon` does."""


@mypyc_attr(native_class=False)
class CallCancelled(Cancelled):
    """The caller cancelled: the response is not awaited."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Sink:
    """Where responses go. `end` is called once, after the last `send`; maybe before the work's start returns."""

    __slots__ = ()

    @abstractmethod
    def send(self, response: Any, /) -> bool:
        """Take one response: an `InferenceResponse`, or what a model that takes a protocol's messages returned.

        Return False if the next one has to wait until `Running.resume` is called.
        """

    @abstractmethod
    def end(self, error: ServingError | None, /) -> None:
        """Take the end, with the error if it failed; `CallCancelled` if it was cancelled.

        Must not keep the error: its frames may refer to the request.
        """

    def send_all(self, responses: deque[Any], /) -> bool:
        """Take and remove responses as long as there is room; returns what the last `send` did, else True."""
        while responses:
            if not self.send(responses.popleft()):
                return False
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class Running:
    """Work that was started with a `Sink`.

    `task` runs its code on the event loop, if any. `over`: it has ended.
    """

    __slots__ = ("over", "task")
    over: bool
    task: asyncio.Task[None] | None

    @abstractmethod
    def cancel(self) -> None:
        """Cancel it: its responses are no longer needed. It ends as soon as its code on the loop allows."""

    @abstractmethod
    def resume(self) -> None:
        """Send on: the sink, which has returned False, has room for the next response."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Requests:
    """The requests of a bidirectional stream that have arrived. On the event loop."""

    __slots__ = ()

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether all requests were taken, and no more can arrive."""

    @abstractmethod
    def take(self) -> Any:
        """Return the next request, or None if none has arrived. Raise `ServingError`."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Conversation(Running):
    """Work on a bidirectional stream, which takes its `Requests` as it has room for them."""

    __slots__ = ()

    @abstractmethod
    def receive(self) -> None:
        """Take requests: some have arrived, or the end. Called once for requests that arrive together."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Watcher:
    """Observes the responses of one request: its trace, its record."""

    __slots__ = ()

    @abstractmethod
    def on_response(self, response: Any) -> None:
        """Note one response of a stream, before it is sent."""

    @abstractmethod
    def on_end(self, response: Any) -> None:
        """Note the end; with the response of a request that has one, else None."""
