"""Which of several servers a call goes to, and whether and when it is tried again.

Strategy: plain code without connections, which gets the time as an argument; the clients, blocking and asyncio, do
what it decides. Inference is idempotent: a call may be sent again to another server, unless it is of a sequence.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from triglot.core.errors import Code, ServingError

RETRIED: Final = frozenset({Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED})
"""What another server, or the same one later, may answer otherwise."""
FAILED: Final = RETRIED | {Code.DEADLINE_EXCEEDED}
"""After these, other servers are preferred for a while."""
DAY: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Retries:
    """How a call that failed is tried again.

    `attempts`: of one call, on all servers; 1: no retry. `budget`: how many calls may be retries or hedges, as a
    share of those that succeed, beyond the first `burst` ones: a fault of all servers does not become more load.
    `first_delay` and `longest_delay`: seconds before the next attempt where the server does not say when, doubled
    each time, with jitter; another server that is there is tried at once. `hedge_after`: seconds without an answer
    after which the same call is also sent to another server, and the first answer taken; None: never.
    `check_after`: seconds after which one of several servers that owes answers is asked for its health; if that
    has no answer for as long again, its calls are sent to others, until it answers.
    """

    attempts: int = 4
    budget: float = 0.1
    burst: int = 100
    first_delay: float = 0.05
    longest_delay: float = 2.0
    hedge_after: float | None = None
    check_after: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not (self.budget >= 0 and self.burst >= 0):
            raise ValueError(f"expected attempts >= 1, budget >= 0 and burst >= 0, got {self}")
        if not (self.first_delay >= 0 and self.longest_delay >= 0):
            raise ValueError(f"expected first_delay >= 0 and longest_delay >= 0, got {self}")
        seconds = (self.check_after, DAY if self.hedge_after is None else self.hedge_after)
        if not all(0 < each <= DAY for each in seconds):
            raise ValueError(f"expected check_after and hedge_after > 0 and at most a day, got {self}")


@dataclass(slots=True, eq=False)
class Endpoint:
    """A server's address, and what is known of it."""

    address: str
    in_flight: int = 0
    failures: int = 0
    """Those in a row."""
    back_at: float = 0.0
    """When it may be tried again, in seconds of the monotonic clock."""
    heard_at: float = 0.0
    """When it last answered, or got a call while it owed no answer."""
    silent: bool = False
    """Whether its last health check had no answer."""


@dataclass(slots=True)
class Balancer:
    """Chooses servers: of those that are there the one with fewest calls in flight. Threads may share it."""

    endpoints: Sequence[Endpoint]
    retries: Retries
    sent: int = 0
    """How many attempts there were so far."""
    tokens: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: int = 0

    def __post_init__(self) -> None:
        self.tokens = float(self.retries.burst)

    def begin(self, now: float, tried: Collection[Endpoint] = ()) -> Endpoint:
        """Return the server for an attempt, which counts as in flight there until `end`.

        Prefer those not yet `tried`; if none is thought to be there, the one that is due first.
        """
        with self._lock:
            self._turn += 1
            first = self._turn % len(self.endpoints)  # Of equal ones, each in turn.
            turned = (*self.endpoints[first:], *self.endpoints[:first])
            chosen = min(
                turned,
                key=lambda each: (each.silent, max(each.back_at - now, 0.0), each in tried, each.in_flight),
            )
            self._sent(chosen, now)
            if chosen.back_at > 0.0 and chosen.back_at <= now:  # One call finds out whether it is back.
                chosen.back_at = now + self._delay(chosen.failures)
            return chosen

    def begin_at(self, number: int, now: float) -> Endpoint:
        """Return the server for this number, always the same one; its call is in flight there until `end`."""
        with self._lock:
            chosen = self.endpoints[number % len(self.endpoints)]
            self._sent(chosen, now)
            return chosen

    def end(self, endpoint: Endpoint, error: ServingError | None, now: float) -> None:
        """Note the outcome of an attempt."""
        with self._lock:
            endpoint.in_flight -= 1
            if error is None or error.code is not Code.DEADLINE_EXCEEDED:
                endpoint.heard_at = now
            if error is None or error.code not in FAILED:
                endpoint.failures, endpoint.back_at = 0, 0.0
                self.tokens = min(self.tokens + self.retries.budget, float(self.retries.burst))
                return
            endpoint.failures += 1
            wait = (
                error.retry_after
                if error.retry_after and error.retry_after > 0
                else self._delay(endpoint.failures)
            )
            endpoint.back_at = max(endpoint.back_at, now + wait)

    def cancel(self, endpoint: Endpoint, now: float, *, slow: bool) -> None:
        """Note that an answer is not waited for; `slow`: as that of a server asked later came first."""
        with self._lock:
            endpoint.in_flight -= 1
            if slow:
                endpoint.failures += 1
                endpoint.back_at = now + self._delay(endpoint.failures)

    def to_check(self, now: float) -> list[Endpoint]:
        """Return the servers to ask for their health: those that owe answers, and those that are silent."""
        if len(self.endpoints) == 1:
            return []  # There is no other for its calls.
        since = now - self.retries.check_after
        return [each for each in self.endpoints if each.silent or (each.in_flight and each.heard_at <= since)]

    def checked(self, endpoint: Endpoint, now: float, *, answered: bool) -> None:
        """Note whether a server answered a health check."""
        with self._lock:
            if answered:
                endpoint.heard_at = now
                if endpoint.silent:
                    endpoint.failures, endpoint.back_at = 0, 0.0
            endpoint.silent = not answered

    def may_retry(self, error: ServingError, attempts: int) -> bool:
        """Whether a call that failed after so many attempts is tried again; it then counts in the budget."""
        refused = error.retry_after is not None and error.retry_after < 0
        return error.code in RETRIED and not refused and attempts < self.retries.attempts and self.spend()

    def spend(self) -> bool:
        """Take one call from the budget; returns whether there was one."""
        with self._lock:
            if self.tokens < 1.0:
                return False
            self.tokens -= 1.0
            return True

    def wait(self, now: float) -> float:
        """Return the seconds until the next attempt: none while a server is there."""
        with self._lock:
            first = min(self.endpoints, key=lambda each: (each.silent, each.back_at))
            return max(0.0, first.back_at - now)

    def may_hedge(self, now: float, tried: Collection[Endpoint]) -> bool:
        """Whether a server that was not `tried` is there, and the budget has a call for it; take it then."""
        others = (each for each in self.endpoints if each not in tried and not each.silent)
        return any(each.back_at <= now for each in others) and self.spend()

    def _sent(self, endpoint: Endpoint, now: float) -> None:
        self.sent += 1
        if not endpoint.in_flight:
            endpoint.heard_at = now
        endpoint.in_flight += 1

    def _delay(self, failures: int) -> float:
        delay = min(self.retries.first_delay * 2.0 ** min(failures - 1, 30), self.retries.longest_delay)
        return delay * random.uniform(0.8, 1.2)
