"""Limits on a client's calls: requests per second, and open calls."""

from __future__ import annotations

from triglot.core.errors import RETRY_AFTER_SECONDS, QuotaExceeded
from triglot.platform.tallies import Tally

SECOND = 1_000_000_000
"""One second in nanoseconds; an idle client may send the requests of one second at once."""


class CallLimits:
    """`ClientLimits` of one client, for all its credentials. `rate`, `concurrent`: 0 for no limit. On the loop."""

    __slots__ = ("__weakref__", "_concurrent", "_rate", "_tally", "_who")

    def __init__(self, client: str, rate: float, concurrent: int, tally: Tally) -> None:
        self._who = f"client '{client}'" if client else "clients without credentials"
        self._rate, self._concurrent = rate, concurrent
        self._tally = tally

    def change(self, rate: float, concurrent: int) -> None:
        """Set the limits of a changed access file."""
        self._rate, self._concurrent = rate, concurrent

    def enter(self) -> None:
        if not self._tally.enter(self._concurrent):
            raise QuotaExceeded(
                f"too many open calls of {self._who}: at most {self._concurrent}",
                retry_after=RETRY_AFTER_SECONDS,
            )
        try:
            self.count()
        except QuotaExceeded:
            self._tally.leave()
            raise

    def count(self) -> None:
        if not self._rate:
            return
        interval = int(SECOND / self._rate)
        early = self._tally.take(interval, max(SECOND, interval))
        if early:
            raise QuotaExceeded(
                f"too many requests of {self._who}: at most {self._rate:g} a second",
                retry_after=early / SECOND,
            )

    def leave(self) -> None:
        self._tally.leave()
