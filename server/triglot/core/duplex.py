"""A stream of requests and answers, as a row may have it from its transport: without a wait for each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable


class Duplex(ABC):
    """Requests as they come, and the way out for answers. On the loop.

    Either it is iterated over, or it is listened to. Answers leave by `offer`, or as those of any stream.
    """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether there are no requests any more, and will be none."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[bytes]:
        """The requests. Raises `ServingError`."""

    @abstractmethod
    def listen(self, came: Callable[[], None]) -> None:
        """Have `came` called when there is something to take, or the end: once for all that came together."""

    @abstractmethod
    def take(self) -> bytes | None:
        """The next request, if it is there. Raises `ServingError`."""

    @abstractmethod
    def offer(self, answers: deque[bytes]) -> None:
        """Send as many as can leave at once, none while another answer is on its way; they are taken out."""

    @abstractmethod
    async def close(self) -> None:
        """Nobody listens any more."""
