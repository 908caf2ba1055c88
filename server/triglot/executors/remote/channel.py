"""One end of the channel between the server and a process: frames over a socket, tensors in shared memory.

Between machines the tensors follow their frame on the same connection.

Strategy: of the threads that wait for a frame one at a time reads, for all of them, so that a call needs no thread
besides its caller's. Sending never blocks: what the socket does not take at once, a thread of its own sends.

To wake a sleeping core takes as long as a small call to a process, and costs the waking side time, too. So a
process whose last frame arrived soon busy-waits a while for the next one before it sleeps. The server does not:
its threads would hold the interpreter's lock.
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from triglot.core.tensor import Array
from triglot.executors.remote.frames import Frame, FrameError, FrameReader, Kind, Place, pack
from triglot.executors.remote.shared_memory import (
    MAX_BYTES,
    NOTHING,
    Arena,
    Mirror,
    Named,
    Placed,
    Row,
    arrays_at,
    packed,
    placed_behind,
)
from triglot.executors.remote.values import loads

T = TypeVar("T")

BEAT_SECONDS = 0.1
"""Seconds between two heartbeats of a process, and between two checks of it."""
_CHUNK = 64 * 1024
_MAX_PARTS = 512
"""Buffers of one system call; the system allows 1024."""
_DESCRIPTOR = array.array("i", [0]).itemsize
_SPACE = socket.CMSG_SPACE(_DESCRIPTOR)
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
SOON = 400e-6
"""Seconds of busy-waiting, unless the last frame took longer to arrive; in that time a sender can place 1 MiB."""


class PeerClosed(Exception):
    """The other side has closed the channel, or has sent invalid bytes."""


class Message(NamedTuple):
    """A received frame. `named` tensors may lie over a region of shared memory; None: the frame has none."""

    kind: Kind
    call: int
    text: bytes
    named: Named | None

    @property
    def tensors(self) -> dict[str, Array] | None:
        """The tensors by name."""
        return None if self.named is None else dict(self.named)

    @property
    def fields(self) -> Any:
        """The value of its JSON text; None without one."""
        return loads(self.text) if self.text else None


class Mailbox:
    """What has arrived for one call or question, and was not taken yet: messages, or the error that ends it.

    `sent`: its first frame may have left this side.
    """

    __slots__ = ("_wake", "messages", "sent")

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.sent = False
        self._wake: asyncio.Future[None] | None = None

    def put(self, message: object) -> None:
        """Add a message, and wake its waiter on an event loop. On any thread."""
        self.messages.append(message)
        if (wake := self._wake) is not None:
            with suppress(RuntimeError):  # The loop is closed.
                wake.get_loop().call_soon_threadsafe(_resolve, wake)

    async def filled(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until there is a message."""
        while not self.messages:
            self._wake = loop.create_future()
            if not self.messages:
                await self._wake
            self._wake = None


class _Unsent:
    """A frame that is being sent: its `parts`, and the file descriptor that accompanies the first of them."""

    __slots__ = ("box", "descriptor", "parts")

    def __init__(self, parts: list[memoryview], descriptor: int | None, box: Mailbox | None) -> None:
        self.parts = parts
        self.descriptor = descriptor
        self.box = box

    def has_sent(self, size: int) -> None:
        """Note that the next `size` bytes were sent, and with the first of them the descriptor."""
        self.close()
        parts = self.parts
        if size == len(parts[0]) and len(parts) == 1:
            parts.clear()
            return
        self.box = None  # It has received a part of it.
        while parts and size >= len(parts[0]):
            size -= len(parts.pop(0))
        if size:
            parts[0] = parts[0][size:]

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Channel:
    """One end of the channel. Any thread may use it. `shares_memory`: the other end is on the same machine.

    `deliver` gets each message, in order, on the thread that has read it, under the channel's lock. `on_close` is
    called without the lock, once the other side is gone: it ends what the waiting threads wait for.
    """

    def __init__(self, end: socket.socket, *, shares_memory: bool = True) -> None:
        self.socket = end
        self.shares_memory = shares_memory
        self.deliver: Callable[[Message], object] = _drop
        self.on_close: Callable[[], object] = _nothing
        self.wakeful = False
        """Whether to busy-wait for a frame that is likely to arrive soon."""
        self.unattended = False
        """Whether no thread may be reading while a coroutine waits."""
        self.received_count = 0
        """Grows with what is received."""
        self.peer_closed = False
        """Whether the other side is known to be gone."""
        self.arena = Arena()
        self.lock = threading.Lock()
        self._mirror = Mirror()
        self._reader = FrameReader()
        self._descriptors: deque[int] = deque()
        self._turn = threading.Condition(self.lock)
        self._waiting = 0
        self._reading = False
        self._poll, self._unread = select.poll(), select.poll()
        self._poll.register(end, select.POLLIN)
        self._unread.register(end, select.POLLIN)
        self._soon = False
        self._unsent: deque[_Unsent] = deque()
        self._sending = threading.Lock()

    # --- send ---

    def place(self, tensors: Mapping[Any, Any]) -> Placed:
        """Copy the tensors, named by their keys, for `send`. Raise as `packed`, and `OSError`."""
        return self.place_all(packed(tensors))

    def place_all(self, rows: Iterable[Row]) -> Placed:
        """As `place`; several tensors may have the same name. Raise `MemoryError` and `OSError`.

        Between machines, contiguous arrays are not copied: they are read while they are sent.
        """
        return self.arena.place(rows) if self.shares_memory else placed_behind(rows)

    def send(
        self,
        kind: Kind,
        *,
        call: int = 0,
        text: bytes = b"",
        placed: Placed | None = None,
        box: Mailbox | None = None,
    ) -> None:
        """Send a frame of the call, or question, of this number; does nothing once the other side is gone.

        `text`: JSON, or nothing. `box` is marked as sent. Raise `FrameError` for a frame that is too long.
        """
        placed = placed or _NO_TENSORS
        released = self._mirror.released()
        try:
            data = pack(Frame(kind, call, text, placed.places, placed.region, placed.region_size, released))
        except FrameError:
            self._mirror.requeue_released(released)
            self.drop(placed)
            raise
        self._unsent.append(
            _Unsent([memoryview(data), *(memoryview(part) for part in placed.parts)], placed.descriptor, box)
        )
        self._flush()

    def drop(self, placed: Placed | None) -> None:
        """Release tensors that are not sent."""
        if placed is not None:
            self.arena.forget(placed.region)
            if placed.descriptor is not None:
                os.close(placed.descriptor)

    @property
    def congested(self) -> bool:
        """Whether frames wait until the other side has read earlier ones."""
        return bool(self._unsent)

    def _flush(self) -> None:
        # Another thread that sends meanwhile takes along what it finds; hence again after each release.
        while self._unsent and self._sending.acquire(blocking=False):
            try:
                self._send_all(socket.MSG_DONTWAIT)
            except BlockingIOError:
                threading.Thread(target=self.flush, name="sends", daemon=True).start()
                return
            finally:
                self._sending.release()

    def flush(self) -> None:
        """Block until all frames are sent, or the other side is gone."""
        while self._unsent:
            with self._sending:
                self._send_all(0)

    def _send_all(self, flags: int) -> None:
        """Send all frames. Raise `BlockingIOError` if that would block, as `flags` may forbid."""
        while self._unsent:
            frame = self._unsent[0]
            if frame.box is not None:
                frame.box.sent = True  # Before sending: the other side may have received it even if it ends now.
            try:
                while frame.parts:
                    passed = () if frame.descriptor is None else (_rights(frame.descriptor),)
                    frame.has_sent(self.socket.sendmsg(frame.parts[:_MAX_PARTS], passed, flags))
            except BlockingIOError:
                raise
            except OSError:
                if frame.box is not None:
                    frame.box.sent = False
                self.shut_down()  # Also if only one direction is closed: who reads has to notice it.
                self._drop_unsent()
            else:
                self._unsent.popleft()

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._unsent.popleft().close()

    # --- receive ---

    async def take(self, box: Mailbox) -> Any:
        """Return the box's next message; waits for it, or blocks on a thread without an event loop.

        Raise the error that was put there.
        """
        if not box.messages:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self.wait(box.messages.__len__)
            else:
                if self.unattended:
                    loop.run_in_executor(None, self.wait, box.messages.__len__)
                await box.filled(loop)
        message = box.messages.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def wait(self, done: Callable[[], object]) -> None:
        """Read, or wait for the thread that reads, until `done` returns true, which is called under the lock."""
        with self.lock:
            while not done():
                if self._reading:
                    self._waiting += 1
                    self._turn.wait()
                    self._waiting -= 1
                else:
                    self._read()

    def read_until_closed(self) -> None:
        """Read until the other side is gone. On a thread of its own."""
        self.wait(lambda: self.peer_closed)

    def poll(self) -> None:
        """Deliver what has arrived, unless another thread reads. Does not block."""
        with self.lock:
            while not (self._reading or self.peer_closed) and (self._reader.complete or self._poll.poll(0)):
                self._read()

    def _read(self) -> None:
        self._reading = True
        self.lock.release()
        message = None
        try:
            message = self.receive()
        except PeerClosed:
            self.on_close()
        finally:
            self.lock.acquire()
            self._reading = False
            if self._waiting:
                self._turn.notify_all()
        if message is None:
            self.peer_closed = True
        else:
            self.deliver(message)

    def receive(self) -> Message:
        """Return the next message, waiting for it. Raise `PeerClosed`, also for bytes that are not a valid frame.

        On one thread at a time.
        """
        try:
            while (frame := self._reader.next()) is None:
                self._fill()
            named = None if frame.places is None else self._tensors(frame, frame.places)
            if frame.released:
                self.arena.release(frame.released)
        except (OSError, ValueError, TypeError, LookupError, OverflowError) as error:
            raise PeerClosed(str(error)) from error
        return Message(frame.kind, frame.call, frame.text, named)

    def _tensors(self, frame: Frame, places: tuple[Place, ...]) -> Named:
        """Return the frame's tensors; maps its region if it is new. Raise `ValueError` and `OSError`."""
        if not self.shares_memory:
            return self._behind(frame.region_size, places)
        if frame.region_size:
            if not self._descriptors:
                raise FrameError(f"region {frame.region} came without its file descriptor")
            self._mirror.adopt(frame.region, frame.region_size, self._descriptors.popleft())
        return self._mirror.tensors(frame.region, places)

    def _behind(self, size: int, places: tuple[Place, ...]) -> Named:
        """Return the tensors that follow the frame. Raise `OSError`, and `ValueError` for impossible sizes."""
        if not size:
            return arrays_at(NOTHING, places)
        if size > MAX_BYTES or max(place.offset + place.size for place in places) > size:
            raise ValueError(f"tensors of {size} bytes")
        base = np.empty(size, np.uint8)
        view = base.data[self._reader.take(base.data) :]
        while view:
            if not (count := self.socket.recv_into(view)):
                raise PeerClosed("the connection was closed")
            self.received_count += 1
            view = view[count:]
        base.flags.writeable = False
        return arrays_at(base, places)

    def _fill(self) -> None:
        until = time.monotonic() + SOON if self.wakeful else 0.0
        if self._soon:
            while not self._poll.poll(0) and time.monotonic() < until:
                os.sched_yield()  # Other threads that are ready to run on this core run first.
        data, ancillary, _, _ = self.socket.recvmsg(_CHUNK, _SPACE, _CLOSE_ON_EXEC)
        self._soon = self.wakeful and time.monotonic() < until
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                complete_bytes = len(content) - len(content) % _DESCRIPTOR
                self._descriptors.extend(array.array("i", content[:complete_bytes]))
        if not data:
            raise PeerClosed("the connection was closed")
        self.received_count += 1
        self._reader.feed(data)

    def has_unread(self) -> bool:
        """Return whether the other side has sent bytes that are still unread. On one thread at a time."""
        return any(events == select.POLLIN for _, events in self._unread.poll(0))

    def trim(self, now: float) -> None:
        """Return unused memory to the system. `now` is in seconds of `time.monotonic`."""
        self.arena.trim(now)

    def shut_down(self) -> None:
        """End the connection, on both sides, also if processes that this one has started have its socket, too."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. No thread may be sending or receiving."""
        self.peer_closed = True
        with self._sending:
            self._drop_unsent()
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


# --- coroutines on a thread without an event loop: whatever they await there blocks, so they never suspend ---


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, and return its result. Raise what it raises, and `RuntimeError` if it suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    with suppress(RuntimeError):  # What it does at its end would wait, too.
        work.close()
    raise RuntimeError("expected code that blocks, and it waits for an event loop")


Run = Callable[[Coroutine[Any, Any, Any]], Any]


def iterate(answers: AsyncGenerator[T, None], run: Run = run_blocking) -> Generator[T, None, None]:
    """Yield the generator's items, each step run by `run`; closing this generator closes that one."""
    try:
        while (answer := run(_next(answers))) is not None:
            yield answer
            del answer
    finally:
        run(_close(answers))


async def _next(answers: AsyncGenerator[T, None]) -> T | None:
    return await anext(answers, None)


async def _close(answers: AsyncGenerator[Any, None]) -> None:
    await answers.aclose()


_NO_TENSORS = Placed(None)


def _rights(descriptor: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _drop(_: Message) -> None:
    """Ignore a message, before `deliver` is set."""


def _nothing() -> None:
    """Do nothing, before `on_close` is set."""
