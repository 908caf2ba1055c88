"""A batcher in simulated time: clients, one queue, instances whose batches cost a + b·n (spec 5.1).

Strategy: a discrete-event simulation around the batcher's own `form`. Every request has one row. The random
numbers have a seed, so a run always comes out the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol

from triglot.engine.forming import Lane, Rules, Run, Wait, Waiting, form

KEY = "x"
"""All requests can share a batch."""


class Policy(Protocol):
    """What `DelayTuner` offers the batcher."""

    delay: float
    size: int
    most: int

    def observe(
        self, now: float, rows: int, compute_seconds: float, latencies: Sequence[float], waiting: int
    ) -> None: ...


@dataclass(slots=True)
class Fixed:
    """A setting made by hand."""

    delay: float
    size: int
    most: int = 10**6

    def observe(
        self, now: float, rows: int, compute_seconds: float, latencies: Sequence[float], waiting: int
    ) -> None:
        """It does not learn."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs the batches; `noise` is the standard deviation of a batch's cost, as a share of it."""

    fixed: float = 0.002
    per_row: float = 0.00002
    max_batch_size: int = 256
    instances: int = 1
    noise: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a run gave: when each request ended, and how long it took."""

    ended: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    batches: list[tuple[float, int]] = field(default_factory=list)

    def between(self, start: float, end: float) -> Outcome:
        """What ended in that time."""
        kept = [(at, latency) for at, latency in zip(self.ended, self.latencies, strict=True) if start <= at < end]
        batches = [one for one in self.batches if start <= one[0] < end]
        return Outcome([at for at, _ in kept], [latency for _, latency in kept], batches)

    def rate(self, start: float, end: float) -> float:
        """Requests a second."""
        return sum(1 for at in self.ended if start <= at < end) / (end - start)

    @property
    def mean(self) -> float:
        return sum(self.latencies) / len(self.latencies)

    @property
    def p99(self) -> float:
        return sorted(self.latencies)[int(len(self.latencies) * 0.99)]


class Simulation:
    """One model under load; `clients` put what they send with `at`, and hear of every end by `on_end`."""

    def __init__(self, machine: Machine, policy: Policy, seed: int = 1) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.outcome = Outcome()
        self._machine = machine
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting: list[Waiting] = []
        self._wait: Wait | None = None
        self._idle = machine.instances
        self._running = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self._events, (time, next(self._order), action))

    def send(self, on_end: Callable[[], None] = lambda: None) -> None:
        """A request comes now."""
        self.send_all(1, on_end)

    def send_all(self, requests: int, on_end: Callable[[], None]) -> None:
        """So many come now, in one turn of the loop."""
        self._waiting += [Waiting(on_end, 1, KEY, self.now) for _ in range(requests)]
        if self._wait is None or len(self._waiting) >= self._wait.target:
            self._form()

    def run(self, until: float) -> Outcome:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until
        return self.outcome

    def _form(self) -> None:
        self._wait = None
        while self._idle and self._waiting:
            most = min(self._policy.most, self._machine.max_batch_size)
            rules = Rules(most, delay=self._policy.delay, enough=self._policy.size)
            decision = form([Lane(waiting=self._waiting)], self.now, rules).then
            if isinstance(decision, Run):
                self._execute(decision.members)
            elif decision is not None:
                self._wait = decision
                self.at(decision.until, lambda wait=decision: self._look_again(wait))  # type: ignore[misc]
                return

    def _look_again(self, wait: Wait) -> None:
        if self._wait is wait:
            self._form()

    def _execute(self, members: Sequence[Waiting]) -> None:
        del self._waiting[: len(members)]
        self._idle -= 1
        self._running += len(members)
        machine = self._machine
        cost = machine.fixed + machine.per_row * len(members)
        cost *= max(0.2, self.random.gauss(1.0, machine.noise))
        self.at(self.now + cost, lambda: self._finish(members, cost))

    def _finish(self, members: Sequence[Waiting], cost: float) -> None:
        self._idle += 1
        latencies = [self.now - one.arrived for one in members]
        self.outcome.ended += [self.now] * len(members)
        self.outcome.latencies += latencies
        self.outcome.batches.append((self.now, len(members)))
        self._running -= len(members)
        self._policy.observe(self.now, len(members), cost, latencies, len(self._waiting) + self._running)
        for one in members:
            one.work()
        self._form()


@dataclass(slots=True)
class ClosedLoop:
    """So many clients that ask again when they have their answer.

    An answer and the next request take `transit` seconds, and on average as much again by chance; all of them pass
    a door that takes `door` seconds for each. With the probability `pause_chance` a client is away for `pause`.
    """

    clients: int
    transit: float = 0.0002
    door: float = 0.0
    pause_chance: float = 0.0
    pause: float = 0.0

    def start(self, simulation: Simulation, begin: float = 0.0, end: float = float("inf")) -> None:
        """Ask from `begin` until `end`."""
        free = begin

        def again() -> None:
            nonlocal free
            random = simulation.random
            comes = simulation.now + self.transit
            comes += random.expovariate(1 / self.transit) if self.transit else 0.0
            if self.pause_chance and random.random() < self.pause_chance:
                comes += self.pause
            if self.door:
                free = max(free, comes) + self.door
                comes = free
            if comes < end:
                simulation.at(comes, send)

        def send() -> None:
            simulation.send(again)

        for number in range(self.clients):
            simulation.at(begin + number * 1e-5, send)


@dataclass(slots=True)
class Turns:
    """So many clients that ask again when they have their answer, behind a loop that does one thing at a time.

    Whatever has been answered when the loop has time is sent, and asked again, in one turn of it, which takes
    `transit` seconds and `door` more for each; so what is answered together comes back together. `noise`: as of a
    machine.
    """

    clients: int
    door: float
    transit: float = 0.0002
    noise: float = 0.0

    def start(self, simulation: Simulation, begin: float = 0.0, end: float = float("inf")) -> None:
        """Ask from `begin` until `end`."""
        answered = self.clients
        busy = False

        def again() -> None:
            nonlocal answered
            answered += 1
            simulation.at(simulation.now, turn)

        def turn() -> None:
            nonlocal answered, busy
            if answered and not busy:
                count, answered, busy = answered, 0, True
                takes = self.transit + count * self.door * max(0.2, simulation.random.gauss(1.0, self.noise))
                simulation.at(simulation.now + takes, lambda: over(count))

        def over(count: int) -> None:
            nonlocal busy
            busy = False
            if simulation.now < end:
                simulation.send_all(count, again)
                turn()

        simulation.at(begin, turn)


@dataclass(slots=True)
class OpenLoop:
    """Requests that come by chance, so many a second, in bursts of so many at once."""

    rate: float
    burst: int = 1

    def start(self, simulation: Simulation, begin: float = 0.0, end: float = float("inf")) -> None:
        """Ask from `begin` until `end`."""

        def arrive() -> None:
            for number in range(self.burst):
                simulation.at(simulation.now + number * 1e-5, simulation.send)
            comes = simulation.now + simulation.random.expovariate(self.rate / self.burst)
            if comes < end:
                simulation.at(comes, arrive)

        simulation.at(begin, arrive)
