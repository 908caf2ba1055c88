"""The streams of one connection, seen from the server: which are open, and how they end (RFC 9113, 5).

What frames cost their sender:

- A client may reset any stream that it opened, at no cost: a deadline, a cancelled call. The stream's handler is
  cancelled, or does not start if the reset came together with the request. Until it has ended it counts: with
  `Limits.max_reset_running` of them, new streams are refused with REFUSED_STREAM.
- Each stream, and each DATA frame that we send, earns the client some WINDOW_UPDATEs, PINGs and late frames.
- All else that makes work, refused streams too, is paid from a budget that refills with time. When it is used up,
  the connection ends with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.sending import Sender
from triglot.transports.http2.core.windows import AbuseBudget, ReceiveWindow

MOST_RESET_REMEMBERED = 1024
STREAM_EARNS = 5
"""Frames that a stream explains: room for its answer, twice; room on the connection, a PING, a late reset."""


class Sink(Protocol):
    """Where a stream's data may be received to. It raises nothing."""

    def room(self) -> memoryview | None:
        """Where the next bytes go; None: nowhere in particular."""

    def filled(self, count: int) -> None:
        """So many bytes are there now."""


class Stream:
    """A request that is not over yet."""

    __slots__ = ("ended", "id", "reset_with", "sink", "window")

    def __init__(self, number: int, window: int) -> None:
        self.id = number
        self.window = ReceiveWindow(window)
        self.ended = False
        """Whether the other side has said everything."""
        self.sink: Sink | None = None
        self.reset_with: ErrorCode | None = None
        """What the other side is told when we have said all before it has."""


class Broken(Exception):
    """The connection cannot go on."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Streams:
    """Those that are open, by number. `window` and `abuse_budget` are the whole connection's."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.first_window = min(limits.first_window, limits.stream_window)
        self.open: dict[int, Stream] = {}
        self.last = 0
        """The highest number that was used."""
        self.refuse_after = frames.LARGEST_WINDOW
        self.window = ReceiveWindow(max(limits.connection_window, frames.DEFAULT_WINDOW))
        self._abuse_budget = AbuseBudget(
            limits.abuse_budget, limits.abuse_budget_per_second, clock, limits.most_earned
        )
        self._earn = self._abuse_budget.earn
        self.out = Sender(self._answered, self._earn)
        self.reset_now = 0
        """Streams reset by what was read last, which the owner has not acted on."""
        self.reset_running = 0
        """Handlers of streams that are over, which have not ended; the owner's to count."""
        self._reset_lately: dict[int, None] = {}
        self._whole = Stream(0, 0)
        """Stands for each request that has come as a whole: it has nothing that a later byte could change."""
        self._whole.ended = True

    def nuisance(self, what: str) -> None:
        """A frame that nothing explains. Raises `Broken` when there were too many."""
        if not self._abuse_budget.spend():
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def reaction(self, what: str) -> None:
        """A frame that streams and answers explain, a few each. Raises `Broken` when there were too many."""
        if not self._abuse_budget.spend_earned():
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def may_begin(self, number: int) -> bool:
        """Whether a request may begin on this stream as most do.

        Not where as many are open, or were reset while their handlers run, as may be.
        """
        limits = self.limits
        return (
            len(self.open) < limits.max_streams
            and self.reset_now + self.reset_running < limits.max_reset_running
            and self.last < number <= self.refuse_after
            and number & 1 == 1
        )

    def begin(self, number: int, *, ended: bool) -> None:
        """A request; `ended` when it has no body."""
        self.last = number
        stream = self.open[number] = Stream(number, self.first_window)
        stream.ended = ended
        self.out.begin(number)
        self._earn(STREAM_EARNS)

    def begin_whole(self, number: int, size: int) -> bool:
        """A request that `may_begin`, with a whole body of `size` bytes; False where it is not as simple."""
        window = self.window
        if size > window.left or size > self.first_window:
            return False
        window.left -= size
        self.last = number
        self.open[number] = self._whole
        self.out.begin(number)
        self._earn(STREAM_EARNS)
        self.passed(size)
        return True

    def end_whole(self, number: int, size: int) -> bool:
        """All of a body, `size` bytes, is there; False where that is not as simple."""
        stream = self.open.get(number)
        if stream is None or stream.ended or size > stream.window.left or size > self.window.left:
            return False
        self.window.left -= size
        self.open[number] = self._whole
        self.passed(size)
        return True

    def not_idle(self, number: int, what: str) -> None:
        """Raises `Broken` for a stream that nobody has begun."""
        if number > self.last or (number and not number & 1):
            raise Broken(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {number}, which is idle")

    def was_reset(self, number: int) -> bool:
        """Whether we have reset the stream: what was on its way is no fault."""
        return number in self._reset_lately

    def consumed(self, stream: Stream | None, count: int) -> None:
        """So many bytes of a body are gone: as many may come again on its stream."""
        if stream is None or stream.ended:
            return
        opened = stream.window.widen(self.limits.stream_window) + stream.window.consumed(count)
        if opened:
            self.out.write(frames.window_update(stream.id, opened))

    def passed(self, count: int) -> None:
        """So many bytes have come: as many may come again on the connection.

        At once: one stream that nobody reads is not to hold up the others.
        """
        if opened := self.window.consumed(count):
            self.out.write(frames.window_update(0, opened))

    # --- ends ---

    def end(self, stream: Stream) -> None:
        """The other side has said everything."""
        stream.ended = True
        if not self.out.has(stream.id):
            self.open.pop(stream.id, None)

    def _answered(self, number: int) -> None:
        """Our side of the stream is over."""
        stream = self.open.get(number)
        if stream is None:
            return
        if stream.ended:
            del self.open[number]
        elif stream.reset_with is not None:
            self.reset(number, stream.reset_with)

    def forget(self, number: int) -> bool:
        """The stream is over; whether it was not."""
        self.out.drop(number)
        stream = self.open.pop(number, None)
        if stream is None:
            return False
        stream.sink = None
        return True

    def was_left(self, number: int, code: int, events: list[Any], *, by_us: bool = False) -> None:
        """The stream is over before its answer is; nothing happens where it was over already."""
        if self.forget(number):
            self.reset_now += 1
            events.append(StreamReset(number, code, by_us))

    def wrong(self, number: int, code: ErrorCode, events: list[Any]) -> None:
        """End a stream that the other side got wrong. Raises `Broken` when there were too many."""
        self.nuisance("malformed streams")
        self._say_reset(number, code)
        self.was_left(number, code, events, by_us=True)

    def late(self, number: int) -> None:
        """DATA on a stream that is over; grpc-java sends some behind its own reset. Raises `Broken`."""
        self.reaction("DATA frames on closed streams")
        self._say_reset(number, ErrorCode.STREAM_CLOSED)

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream before its time, if it is not over."""
        if self.forget(number):
            self._say_reset(number, code)

    def refuse(self, number: int) -> None:
        """A stream beyond what may be open. Raises `Broken` when there were too many."""
        self.nuisance("concurrent streams")
        self._say_reset(number, ErrorCode.REFUSED_STREAM)

    def _say_reset(self, number: int, code: ErrorCode) -> None:
        self.out.write(frames.rst_stream(number, code))
        self._reset_lately[number] = None
        if len(self._reset_lately) > MOST_RESET_REMEMBERED:
            del self._reset_lately[next(iter(self._reset_lately))]

    def reset_when_sent(self, number: int, code: ErrorCode) -> None:
        """Our side has said all: a stream on which the other side has not is reset once that has left."""
        stream = self.open.get(number)
        if stream is None or stream.ended:
            return
        stream.sink = None
        stream.reset_with = code
        if not self.out.has(number):
            self.reset(number, code)
