"""What is counted of a connection: room in windows, and how much nuisance one may be."""

from __future__ import annotations

from collections.abc import Callable


class ReceiveWindow:
    """What the other side may still send, of a stream or of the whole connection."""

    __slots__ = ("_gone", "left", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = size
        self._gone = 0

    def ahead(self, count: int) -> None:
        """So many bytes may come before as many are gone: what is gone next opens nothing."""
        self.left += count
        self._gone -= count

    def consumed(self, count: int) -> int:
        """So many bytes are gone; by how much the window is to be opened again now, seldom and much at a time."""
        self._gone += count
        if self._gone * 2 < self.size:
            return 0
        opened, self._gone = self._gone, 0
        self.left += opened
        return opened


class Patience:
    """How often the other side may do what costs it nothing and us something: resets, pings, empty frames.

    It comes back with time, and with what we send: answers, which the other side may react to.
    """

    __slots__ = ("_clock", "_left", "_most", "_rate", "_since")

    def __init__(self, most: float, per_second: float, clock: Callable[[], float]) -> None:
        self._most = self._left = most
        self._rate = per_second
        self._clock = clock
        self._since = clock()

    def spend(self) -> bool:
        """Whether some was left."""
        if self._left < 1:  # The clock is looked at when it must be.
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._since) * self._rate)
            self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def reward(self, count: int) -> None:
        """For something that it may react to so often."""
        left = self._left + count  # Asked for every answer: `min` takes three times as long.
        self._left = left if left < self._most else self._most
