"""Calls that come close to each other are handled together.

Strategy: grpc.aio takes in one call at a time, with a dozen switches to its threads and back for each. What is
handled in between runs on cold caches, wakes a model's thread for itself, and leaves by itself: 90 µs a call,
beside grpc.aio's own 100 to 140, where it is 15 to 20 in bursts of 32. So do as network cards do: the first call
waits a moment for the next one, and all go on in one turn of the loop. That is done as long as it is worth it: of
calls that come singly soon none waits any more, but for one in a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from triglot.transports.off_loop import OFF_LOOP_BYTES
from triglot.transports.short_timer import ShortTimer

Unary = Callable[[bytes, Any], Awaitable[bytes]]

PAUSE_MICROSECONDS = 200
"""When none has come in so long, the others go on; grpc.aio takes 100 for a call."""
MOST_CALLS = 32
MOST_PAUSES = 10
"""So the first one waits for 2 ms at most."""
WORTH_CALLS = 3
"""Fewer have waited in vain."""
SHORT_SECONDS = 0.0002
"""Calls that take longer, on the loop, are better off one by one: nothing else runs meanwhile."""
MODEL_TURNS = 2
"""Of the loop, that answers take whose models are code on the loop: the model's task, and the call's."""
PATIENCE = 4
"""So often it may be in vain; from then on 1, 2, 4, ... calls go on at once before it is tried again."""
MOST_DOUBLINGS = 10
FORGIVEN = 2
"""Times in vain, by each that was worth it: one in three has to be."""
PROBED_EVERY = 16
"""Bursts; the others end with as many calls as came of late, as no more come from clients that wait for these."""


class Gathering:
    """Who waits. On the loop; `open` begins it, and `close` ends it, when there are no calls any more.

    `taken`: another call is coming. `join` gives what a call has to wait for, None: for nothing. `answered` gives
    the same when a call that has waited has its answer, for answers that are there at once leave together, too.
    """

    def __init__(self) -> None:
        self._timer: ShortTimer | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._answered: list[asyncio.Future[None]] = []
        self._at_once = False  # Whether the calls of a burst run, that have answers at once.
        self._coming = False
        self._pauses = 0
        self._expected = MOST_CALLS
        self._bursts = 0
        self._in_vain = 0
        self._passing = 0

    def open(self) -> None:
        """Where the system has no timer for it, nothing waits."""
        self._loop = asyncio.get_running_loop()
        try:
            self._timer = ShortTimer(self._loop, PAUSE_MICROSECONDS, self._paused)
        except OSError:
            self._timer = None

    def close(self) -> None:
        """Nothing waits any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.close()
            self._go_on()

    def taken(self) -> None:
        """A call has come, and its request is to follow."""
        self._coming = True

    def join(self) -> asyncio.Future[None] | None:
        """A request is there."""
        waiting = self._waiting
        if waiting:
            self._coming = True
        else:
            if self._passing:
                self._passing -= 1
                return None
            if self._timer is None:
                return None
            self._pauses = 0
            self._coming = False
            self._timer.start()
        turn = self._loop.create_future()
        waiting.append(turn)
        if len(waiting) == self._expected and self._bursts % PROBED_EVERY:
            self._go_on()
        return turn

    def _paused(self) -> None:
        count = len(self._waiting)
        self._pauses += 1
        if not count or self._timer is None:
            return
        if self._coming and count < MOST_CALLS and self._pauses < MOST_PAUSES:
            self._coming = False
            self._timer.start()
        else:
            # One less each time: one burst that was cut in two does not make all others short.
            self._expected = max(count, self._expected - 1, WORTH_CALLS)
            self._go_on()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._bursts += 1
        wake(waiting)
        self._at_once = True
        # After all of these.
        self._loop.call_soon(self._leave, len(waiting), perf_counter(), MODEL_TURNS)

    def answered(self) -> asyncio.Future[None] | None:
        """An answer is there."""
        if not self._at_once:
            return None
        turn = self._loop.create_future()
        self._answered.append(turn)
        return turn

    def _leave(self, count: int, began: float, turns: int) -> None:
        if turns:
            self._loop.call_soon(self._leave, count, began, turns - 1)
            return
        self._at_once = False
        answered, self._answered = self._answered, []
        wake(answered)
        if count >= WORTH_CALLS and perf_counter() - began < count * SHORT_SECONDS:
            self._in_vain = max(self._in_vain - FORGIVEN, 0)
            return
        self._in_vain = min(self._in_vain + 1, PATIENCE + MOST_DOUBLINGS)
        if self._in_vain >= PATIENCE:
            self._passing = 1 << self._in_vain - PATIENCE


def wake(turns: list[asyncio.Future[None]]) -> None:
    """All but those that were cancelled."""
    for turn in turns:
        if not turn.done():
            turn.set_result(None)


def gathered(unary: Unary, gathering: Gathering) -> Unary:
    """The handler that waits for others; large messages, which take longer than a switch, do not."""
    join, answered = gathering.join, gathering.answered

    async def handle(data: bytes, context: Any) -> bytes:
        if len(data) > OFF_LOOP_BYTES or (turn := join()) is None:
            return await unary(data, context)
        await turn
        answer = await unary(data, context)
        if (turn := answered()) is not None:
            await turn
        return answer

    return handle
