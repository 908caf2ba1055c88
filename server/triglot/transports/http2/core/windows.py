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

    def widen(self, size: int) -> int:
        """Make it as large, if it is smaller; by how much it is to be opened."""
        more = size - self.size
        if more <= 0:
            return 0
        self.size = size
        self.left += more
        return more

    def consumed(self, count: int) -> int:
        """So many bytes are gone; by how much the window is to be opened again now, seldom and much at a time."""
        self._gone += count
        if self._gone * 2 < self.size:
            return 0
        opened, self._gone = self._gone, 0
        self.left += opened
        return opened


class AbuseBudget:
    """How many frames the other side may send that cost it nothing and us something: pings, empty frames, faults.

    Two budgets. One refills with time, up to `most`. The other, of at most `most_earned`, is earned by the streams
    that the other side opens and by the DATA that we send: it pays only for frames that these explain.
    """

    __slots__ = ("_clock", "_earned", "_left", "_most", "_most_earned", "_rate", "_since")

    def __init__(self, most: float, per_second: float, clock: Callable[[], float], most_earned: int = 0) -> None:
        self._most = self._left = most
        self._rate = per_second
        self._clock = clock
        self._since = clock()
        self._earned = 0
        self._most_earned = most_earned

    def spend_earned(self) -> bool:
        """Whether a frame that streams and answers may explain is paid for, by either budget."""
        if self._earned:
            self._earned -= 1
            return True
        return self.spend()

    def spend(self) -> bool:
        """Whether a frame that nothing explains is paid for."""
        if self._left < 1:  # The clock is looked at when it must be.
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._since) * self._rate)
            self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def earn(self, count: int) -> None:
        """Something happened that explains so many frames."""
        earned = self._earned + count  # Called for every stream: `min` takes three times as long.
        self._earned = earned if earned < self._most_earned else self._most_earned
