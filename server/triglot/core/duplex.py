"""`Duplex`, a transport's bidirectional stream for rows that need no coroutine switch per message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable


class Duplex(ABC):
    """Incoming requests, and the way to send responses. On the event loop.

    A row either iterates over it or calls `listen`. Responses are sent by `offer`, or yielded as on any stream.
    """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all requests were taken, and no more can arrive."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the requests. Raises `ServingError`."""

    @abstractmethod
    def listen(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when `take` has something, once for requests that arrive together, and at the end."""

    @abstractmethod
    def take(self) -> bytes | None:
        """Returns the next request, or None if none has arrived. Raises `ServingError`."""

    @abstractmethod
    def offer(self, answers: deque[bytes]) -> None:
        """Send and remove as many as can be sent at once; none while another response is being sent."""

    @abstractmethod
    async def close(self) -> None:
        """End `listen`."""
