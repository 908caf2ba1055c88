"""Memory limit for large JSON bodies: they are parsed one at a time, so not all of them have to be in memory.

Strategy: a socket that is not read stops its client, and data that was not sent takes no memory. While the
memory is used up, only the first incomplete body is read further, so that one of them completes, and none while
a complete one waits for the parser. While others wait, a body that is read has to arrive fast enough, or it is
rejected.
"""

from __future__ import annotations

import asyncio
from typing import Self

from triglot.core.errors import RETRY_AFTER_SECONDS, QueueFull

FREE_BYTES = 1024 * 1024
"""A body up to this size is not limited: read-ahead takes as much."""
CHECK_SECONDS = 10.0
MIN_PROGRESS = 640 * 1024
"""Bytes by which a body has to grow in `CHECK_SECONDS` while others wait: half a megabit per second."""
MAX_WAIT_SECONDS = 120.0
"""Seconds that a body waits for memory before it is rejected."""


class TextRoom:
    """Room for `size` bytes, plus what the first body needs beyond that. On the event loop."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.held = 0
        self.complete = 0
        self.incomplete: dict[Place, None] = {}
        """Incomplete bodies, in order of arrival."""
        self.waiting: set[Place] = set()
        self.changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def place(self) -> Place:
        """Return an empty place for one body."""
        return Place(self)

    def change(self) -> None:
        """Wake waiting bodies: there may be room, or another first body."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def reject_slow(self) -> None:
        """Reject bodies that arrive too slowly, until none waits."""
        if self._timer is None:
            for place in self.incomplete:
                place.size_at_check = place.size
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_slow)

    def _check_slow(self) -> None:
        self._timer = None
        if self.waiting:
            for place in self.incomplete.keys() - self.waiting:
                if place.size_at_check is not None and place.size - place.size_at_check < MIN_PROGRESS:
                    place.refuse()
            self.reject_slow()


class Place:
    """What one body holds of the room, until its `with` block ends.

    `reading` is the time limit of its reading; it is ended early when others wait and the body `is_too_slow`.
    """

    __slots__ = ("_room", "is_too_slow", "reading", "size", "size_at_check")

    def __init__(self, room: TextRoom) -> None:
        self._room = room
        self.size = 0
        self.size_at_check: int | None = None  # The size at the last check, if it has been read since then.
        self.reading: asyncio.Timeout | None = None
        self.is_too_slow = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        room = self._room
        if self.size > FREE_BYTES:
            if self in room.incomplete:
                del room.incomplete[self]
            else:
                room.complete -= 1
            room.held -= self.size
            room.change()

    def grow(self, count: int) -> None:
        """Hold `count` more bytes."""
        before = self.size if self.size > FREE_BYTES else 0
        self.size += count
        if self.size > FREE_BYTES:
            self._room.incomplete[self] = None
            self._room.held += self.size - before

    def complete(self) -> None:
        """Note that the body is complete."""
        if self.size > FREE_BYTES:
            del self._room.incomplete[self]
            self._room.complete += 1
            self._room.change()

    @property
    def may_continue(self) -> bool:
        """Whether the rest of the body may be read now."""
        room = self._room
        if self.size <= FREE_BYTES or room.held < room.size:
            return True
        return not room.complete and next(iter(room.incomplete)) is self

    async def wait(self) -> None:
        """Wait until the body may be read further. Raise `QueueFull`."""
        room = self._room
        room.waiting.add(self)
        room.reject_slow()
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                while not self.may_continue:
                    await room.changed.wait()
        except TimeoutError:
            text = f"for {MAX_WAIT_SECONDS:g} seconds other large JSON requests used all of the parsing memory"
            raise QueueFull(text, retry_after=RETRY_AFTER_SECONDS) from None
        finally:
            room.waiting.discard(self)
            self.size_at_check = None

    def refuse(self) -> None:
        """End the time limit of its reading now."""
        if self.reading is not None and not self.reading.expired():
            self.is_too_slow = True
            self.reading.reschedule(asyncio.get_running_loop().time())
