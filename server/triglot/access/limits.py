"""How many calls a client may make: requests a second, and at a time."""

from __future__ import annotations

from time import monotonic

from triglot.core.errors import RETRY_AFTER_SECONDS, QueueFull


class CallLimits:
    """Of one client, whichever of its credentials it uses. `rate`, `concurrent`: 0 for no limit. On the loop.

    A bucket holds the tokens of one second: a client that was silent may send so many at once.
    """

    __slots__ = ("_allowance", "_client", "_concurrent", "_open", "_rate", "_seen")

    def __init__(self, client: str, rate: float, concurrent: int) -> None:
        self._client = client
        self._rate, self._concurrent = rate, concurrent
        self._allowance = max(1.0, rate)
        self._seen = monotonic()
        self._open = 0

    def change(self, rate: float, concurrent: int) -> None:
        """What the file says now."""
        self._rate, self._concurrent = rate, concurrent
        self._allowance = min(self._allowance, max(1.0, rate))

    def enter(self) -> None:
        """See `ClientLimits`."""
        if self._concurrent and self._open >= self._concurrent:
            raise QueueFull(
                f"client '{self._client}' has {self._open} calls open, the most that it may have",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self.count()
        self._open += 1

    def count(self) -> None:
        """See `ClientLimits`."""
        if not self._rate:
            return
        now, most = monotonic(), max(1.0, self._rate)
        allowance = min(most, self._allowance + (now - self._seen) * self._rate)
        self._seen = now
        if allowance < 1:
            self._allowance = allowance
            raise QueueFull(
                f"client '{self._client}' sends more than {self._rate:g} requests a second",
                retry_after=(1 - allowance) / self._rate,
            )
        self._allowance = allowance - 1

    def leave(self) -> None:
        """See `ClientLimits`."""
        self._open -= 1
