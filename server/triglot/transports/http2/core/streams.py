"""The streams of one connection, seen from the server: which are open, and how they end (RFC 9113, 5).

What frames cost the client that sends them:

- It may reset any stream that it opened: a deadline, a cancelled call. The stream's handler is cancelled, or not
  started if the reset arrived together with the request. It counts until it has ended: with
  `Limits.max_reset_running` of them, new streams are refused with REFUSED_STREAM.
- Each stream, and each DATA frame that we send, earns the client some WINDOW_UPDATEs, PINGs and late frames.
- All other frames that cause work, and refused streams, are paid from a budget that refills with time. When it is
  used up, the connection ends with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

from triglot.core.compiling import mypyc_attr
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.sending import Sender

MAX_RECENTLY_RESET: Final = 1024
STREAM_EARNS: Final = 5
"""Frames that a stream accounts for: two for its response's window, one for the connection's, PING, late reset."""


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

        Return by how much to open the window now: rarely, and much at a time.
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

        Return False if both are empty.
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


@mypyc_attr(allow_interpreted_subclasses=True)
class BodySink:
    """A stream's receive buffer. Its methods must not raise."""

    __slots__ = ()

    @abstractmethod
    def room(self) -> memoryview | None:
        """Return where the next bytes go; None: use the connection's buffer."""

    @abstractmethod
    def filled(self, count: int) -> None:
        """Note that `count` bytes have been received."""


class Stream:
    """An open stream."""

    __slots__ = ("end_stream", "id", "reset_with", "sink", "window")

    def __init__(self, number: int, window: int) -> None:
        self.id = number
        self.window = ReceiveWindow(window)
        self.end_stream = False
        """Whether the client has ended its side (END_STREAM)."""
        self.sink: BodySink | None = None
        self.reset_with: ErrorCode | None = None
        """Error code of the reset that is sent if our side ends before the client's."""


@mypyc_attr(native_class=False)
class H2Error(Exception):
    """The connection cannot continue; it ends with this error code."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Streams:
    """The open streams by number. `window` and the abuse budget are those of the whole connection."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.first_window = min(limits.first_window, limits.stream_window)
        self.open: dict[int, Stream] = {}
        self.last = 0
        """Highest stream number that was used."""
        self.refuse_after = frames.LARGEST_WINDOW
        self.window = ReceiveWindow(max(limits.connection_window, frames.DEFAULT_WINDOW))
        self._abuse_budget = AbuseBudget(
            limits.abuse_budget, limits.abuse_budget_per_second, clock, limits.max_earned
        )
        self._earn = self._abuse_budget.earn
        self.out = Sender(self._response_ended, self._earn)
        self.reset_now = 0
        """Number of streams reset in the last read, whose events the owner has not acted on yet."""
        self.reset_running = 0
        """Number of running handlers whose streams have ended; maintained by the owner."""
        self._recently_reset: dict[int, None] = {}
        self._complete = Stream(0, 0)
        """Stands for all requests whose body has arrived: later bytes cannot change these."""
        self._complete.end_stream = True

    def charge(self, what: str) -> None:
        """Charge a frame that nothing accounts for. Raise `H2Error` when there were too many."""
        if not self._abuse_budget.spend():
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def charge_earned(self, what: str) -> None:
        """Charge a frame that streams and responses account for, a few each.

        Raise `H2Error` when there were too many.
        """
        if not self._abuse_budget.spend_earned():
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def may_begin(self, number: int) -> bool:
        """Return whether a new request may begin on this stream.

        False at the limit of open streams, or of streams that were reset while their handlers run.
        """
        limits = self.limits
        return (
            len(self.open) < limits.max_streams
            and self.reset_now + self.reset_running < limits.max_reset_running
            and self.last < number <= self.refuse_after
            and number & 1 == 1
        )

    def begin(self, number: int, *, end_stream: bool) -> None:
        """Open a stream for a request; `end_stream`: it has no body."""
        self.last = number
        stream = self.open[number] = Stream(number, self.first_window)
        stream.end_stream = end_stream
        self.out.begin(number)
        self._earn(STREAM_EARNS)

    def begin_complete(self, number: int, size: int) -> bool:
        """Open a stream for a request that `may_begin`, with a complete body.

        False if the windows do not allow it.
        """
        window = self.window
        if size > window.left or size > self.first_window:
            return False
        window.left -= size
        self.last = number
        self.open[number] = self._complete
        self.out.begin(number)
        self._earn(STREAM_EARNS)
        self.bytes_received(size)
        return True

    def end_complete(self, number: int, size: int) -> bool:
        """Note that a body of `size` bytes has arrived as a whole; False if it needs the general path."""
        stream = self.open.get(number)
        if stream is None or stream.end_stream or size > stream.window.left or size > self.window.left:
            return False
        self.window.left -= size
        self.open[number] = self._complete
        self.bytes_received(size)
        return True

    def check_not_idle(self, number: int, what: str) -> None:
        """Raise `H2Error` for a stream that was never opened."""
        if number > self.last or (number and not number & 1):
            raise H2Error(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {number}, which is idle")

    def was_reset(self, number: int) -> bool:
        """Return whether we have reset the stream: frames that were in flight are no error then."""
        return number in self._recently_reset

    def consumed(self, stream: Stream | None, count: int) -> None:
        """Note that `count` bytes of a body have been consumed, and open the stream's window if it is worth it."""
        if stream is None or stream.end_stream:
            return
        opened = stream.window.widen(self.limits.stream_window) + stream.window.consumed(count)
        if opened:
            self.out.write(frames.window_update(stream.id, opened))

    def bytes_received(self, count: int) -> None:
        """Note that `count` bytes have arrived, and open the connection's window.

        On arrival, not on consumption: one stream that is not read must not block the others.
        """
        if opened := self.window.consumed(count):
            self.out.write(frames.window_update(0, opened))

    # --- ends ---

    def end(self, stream: Stream) -> None:
        """Note that the client has ended its side."""
        stream.end_stream = True
        if not self.out.has(stream.id):
            self.open.pop(stream.id, None)

    def _response_ended(self, number: int) -> None:
        """Note that our side of the stream has ended."""
        stream = self.open.get(number)
        if stream is None:
            return
        if stream.end_stream:
            del self.open[number]
        elif stream.reset_with is not None:
            self.reset(number, stream.reset_with)

    def close(self, number: int) -> bool:
        """Close a stream; returns whether it was open."""
        self.out.drop(number)
        stream = self.open.pop(number, None)
        if stream is None:
            return False
        stream.sink = None
        return True

    def close_early(self, number: int, code: int, events: list[Any], *, by_us: bool = False) -> None:
        """Close a stream before its response ends, and add a `StreamReset`.

        Does nothing if it was closed already.
        """
        if self.close(number):
            self.reset_now += 1
            events.append(StreamReset(number, code, by_us))

    def reset_invalid(self, number: int, code: ErrorCode, events: list[Any]) -> None:
        """Reset a stream after an error of the client. Raise `H2Error` when there were too many."""
        self.charge("malformed streams")
        self._send_reset(number, code)
        self.close_early(number, code, events, by_us=True)

    def reset_closed(self, number: int) -> None:
        """Answer DATA on a closed stream; grpc-java sends some after its own reset. Raise `H2Error`."""
        self.charge_earned("DATA frames on closed streams")
        self._send_reset(number, ErrorCode.STREAM_CLOSED)

    def reset(self, number: int, code: ErrorCode) -> None:
        """Reset a stream that is still open."""
        if self.close(number):
            self._send_reset(number, code)

    def refuse(self, number: int) -> None:
        """Refuse a stream beyond the limits. Raise `H2Error` when there were too many."""
        self.charge("concurrent streams")
        self._send_reset(number, ErrorCode.REFUSED_STREAM)

    def _send_reset(self, number: int, code: ErrorCode) -> None:
        self.out.write(frames.rst_stream(number, code))
        self._recently_reset[number] = None
        if len(self._recently_reset) > MAX_RECENTLY_RESET:
            del self._recently_reset[next(iter(self._recently_reset))]

    def reset_when_sent(self, number: int, code: ErrorCode) -> None:
        """Reset a stream once our response has been sent, if the client has not ended its request by then."""
        stream = self.open.get(number)
        if stream is None or stream.end_stream:
            return
        stream.sink = None
        stream.reset_with = code
        if not self.out.has(number):
            self.reset(number, code)
