"""Room for JSON bodies on their way: long texts are parsed one at a time, so that not all of them need to be here.

Strategy: a socket that nobody reads stops its client, and what a client has not sent costs nothing. While the room
is full, only the first body that is not complete goes on, so that one of them will be, and none while a complete
one waits for the parser. Who may go on has to, as long as others wait: a body that is too slow is refused.
"""

from __future__ import annotations

import asyncio
from typing import Self

from triglot.core.errors import RETRY_AFTER_SECONDS, QueueFull

FREE_BYTES = 1024 * 1024
"""A body that is not longer needs no room: reading ahead takes as much."""
LOOK_SECONDS = 10.0
LEAST_MOVED = 640 * 1024
"""Bytes that a body has to gain in so many seconds while others wait: half a megabit a second."""
LONGEST_WAIT = 120.0
"""Seconds."""


class TextRoom:
    """For so many bytes, and what the first body needs beyond them. On the loop."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.held = 0
        self.complete = 0
        self.coming: dict[Place, None] = {}
        """In the order in which they came."""
        self.waiting: set[Place] = set()
        self.changed = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None

    def place(self) -> Place:
        """Nothing yet, for one body."""
        return Place(self)

    def change(self) -> None:
        """There may be room, or another first body."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def watch(self) -> None:
        """Refuse who is too slow from now on, until nobody waits."""
        if self._look is None:
            for place in self.coming:
                place.seen = place.size
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._refuse_slow)

    def _refuse_slow(self) -> None:
        self._look = None
        if self.waiting:
            for place in self.coming.keys() - self.waiting:
                if place.seen is not None and place.size - place.seen < LEAST_MOVED:
                    place.refuse()
            self.watch()


class Place:
    """What one body holds of the room, until the `with` block ends.

    `reading` is the time limit of its reading, which is over when others wait and the body `is_too_slow`.
    """

    __slots__ = ("_room", "is_too_slow", "reading", "seen", "size")

    def __init__(self, room: TextRoom) -> None:
        self._room = room
        self.size = 0
        self.seen: int | None = None  # The size at the last look, if it has been going on since then.
        self.reading: asyncio.Timeout | None = None
        self.is_too_slow = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        room = self._room
        if self.size > FREE_BYTES:
            if self in room.coming:
                del room.coming[self]
            else:
                room.complete -= 1
            room.held -= self.size
            room.change()

    def grow(self, count: int) -> None:
        """Hold so many bytes more."""
        before = self.size if self.size > FREE_BYTES else 0
        self.size += count
        if self.size > FREE_BYTES:
            self._room.coming[self] = None
            self._room.held += self.size - before

    def complete(self) -> None:
        """Nothing more comes."""
        if self.size > FREE_BYTES:
            del self._room.coming[self]
            self._room.complete += 1
            self._room.change()

    @property
    def may_go_on(self) -> bool:
        """Whether the rest of the body may be read."""
        room = self._room
        if self.size <= FREE_BYTES or room.held < room.size:
            return True
        return not room.complete and next(iter(room.coming)) is self

    async def wait(self) -> None:
        """Until it may go on. Raises `QueueFull`."""
        room = self._room
        room.waiting.add(self)
        room.watch()
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                while not self.may_go_on:
                    await room.changed.wait()
        except TimeoutError:
            text = f"for {LONGEST_WAIT:g} seconds other large JSON requests used all of the parsing memory"
            raise QueueFull(text, retry_after=RETRY_AFTER_SECONDS) from None
        finally:
            room.waiting.discard(self)
            self.seen = None

    def refuse(self) -> None:
        """Let its time be over."""
        if self.reading is not None and not self.reading.expired():
            self.is_too_slow = True
            self.reading.reschedule(asyncio.get_running_loop().time())
