"""Counters of a connection: flow-control windows, and the budget for frames that only cause work."""

from __future__ import annotations

from collections.abc import Callable


class ReceiveWindow:
    """How much the client may still send, on a stream or on the connection."""

    __slots__ = ("_consumed", "left", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = size
        self._consumed = 0

    def allow_ahead(self, count: int) -> None:
        """Allow `count` more bytes in advance: the next bytes consumed do not open the window."""
        self.left += count
        self._consumed -= count

    def widen(self, size: int) -> int:
        """Enlarge the window to `size`; returns by how much it is to be opened, 0 if it is large enough."""
        more = size - self.size
        if more <= 0:
            return 0
        self.size = size
        self.left += more
        return more

    def consumed(self, count: int) -> int:
        """Note that bytes were consumed.

        Returns by how much to open the window now: rarely, and much at a time.
        """
        self._consumed += count
        if self._consumed * 2 < self.size:
            return 0
        opened, self._consumed = self._consumed, 0
        self.left += opened
        return opened


class AbuseBudget:
    """Limits frames that cost the client nothing and the server work: pings, empty frames, errors.

    There are two budgets. One refills with time, up to `limit`. The other, up to `max_earned`, is earned by the
    streams that the client opens and by the DATA that we send: it pays only for frames that these account for.
    """

    __slots__ = ("_clock", "_earned", "_left", "_limit", "_max_earned", "_rate", "_since")

    def __init__(self, limit: float, per_second: float, clock: Callable[[], float], max_earned: int = 0) -> None:
        self._limit = self._left = limit
        self._rate = per_second
        self._clock = clock
        self._since = clock()
        self._earned = 0
        self._max_earned = max_earned

    def spend_earned(self) -> bool:
        """Pay for a frame that streams and responses may account for, from either budget.

        Returns False if both are empty.
        """
        if self._earned:
            self._earned -= 1
            return True
        return self.spend()

    def spend(self) -> bool:
        """Pay for a frame that nothing accounts for; returns False if the budget is empty."""
        if self._left < 1:  # The clock is read only when necessary.
            now = self._clock()
            self._left = min(self._limit, self._left + (now - self._since) * self._rate)
            self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def earn(self, count: int) -> None:
        """Add `count` frames to the earned budget."""
        earned = self._earned + count  # Called for every stream: `min` takes three times as long.
        self._earned = earned if earned < self._max_earned else self._max_earned
