"""In the server: the calls of a process whose code is `async def`; as many run at the same time as come.

Strategy: calls live on the loop. A thread reads what the process says and hands it to the loop, another one
writes, since both may have to wait for the process: the loop never does.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from triglot.core.call import BatchCall, Call
from triglot.core.errors import Internal
from triglot.engine.processes.answers import answer_of, list_of
from triglot.engine.processes.arena import Placed, packed
from triglot.engine.processes.channel import Gone, Message
from triglot.engine.processes.desk import beside_text
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.loop_desk import LoopDesk, refuse, refuse_late
from triglot.engine.processes.owner import NotBegun, Owner, error_from, load_error, mark_cancelled, unavailable
from triglot.engine.processes.remote_call import call_fields, members_of
from triglot.engine.processes.values import dumps, loads
from triglot.engine.work import Inputs

STOP_PATIENCE_SECONDS = 0.5
"""For a call that was cancelled to end in its process; it may block there, and then goes on by itself."""
Order = Callable[[], None]


def _nobody() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Talk:
    """The server's side of one call; on the loop, but for `sent`, which the writing thread sets."""

    number: int
    call: Call
    desk: LoopDesk
    since: float = field(default_factory=time.monotonic)
    follows: Callable[[], object] = _nobody
    sent: bool = False
    ended: bool = False
    given_up: bool = False
    messages: deque[Message | Exception] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None

    def put(self, message: Message | Exception) -> None:
        """What comes next."""
        self.messages.append(message)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self) -> Message:
        """What has come. Raises the error that has ended the call."""
        while not self.messages:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        message = self.messages.popleft()
        if isinstance(message, Exception):
            raise message
        return message


class MultiplexedCalls:
    """Made on any thread; calls are made on one loop."""

    def __init__(self, owner: Owner, *, with_call: bool) -> None:
        self._owner = owner
        self._with_call = with_call
        self._talks: dict[int, _Talk] = {}
        self.given_up = 0
        """Calls that go on though nobody waits for them any more."""
        self._last = 0
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._over = False
        self._own: LoopDesk | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[threading.Thread] = []

    # --- calls ---

    async def run(self, inputs: Inputs, call: Call) -> Any:
        """What `infer` returns. Raises `NotBegun`, `Unavailable` when the process ends or hangs meanwhile, and
        what the model raises."""
        talk = self._begin(partial(self._send_one, inputs), call)
        del inputs
        try:
            return answer_of(await self._done(talk))
        finally:
            await self._end(talk)

    async def run_list(self, inputs: Sequence[Inputs], call: BatchCall) -> list[Any]:
        """What `infer_batch` returns: an answer, or an exception, for each member. Raises as `run`."""
        talk = self._begin(partial(self._send_list, inputs), call)
        del inputs
        try:
            return list_of(await self._done(talk), error_from)
        finally:
            await self._end(talk)

    async def stream(self, inputs: Inputs, call: Call) -> AsyncGenerator[Any, None]:
        """The answers that `infer` yields. Raises as `run`; closing the generator closes the model's."""
        talk = self._begin(partial(self._send_one, inputs), call)
        del inputs
        try:
            while (message := await talk.next()).kind is Kind.ANSWER:
                answer = answer_of(message)
                del message
                talk.since = math.inf  # It waits for the reader.
                yield answer
                del answer
                talk.since = time.monotonic()
                self._post(Kind.GO_ON, talk.number)
            _check(message)
        finally:
            await self._end(talk)

    async def start(self, call: Call) -> None:
        """Have `start_instance` run. Raises `ModelLoadError`, and as `run`."""
        talk = self._begin(partial(self._send_start), call)
        try:
            await self._done(talk)
        finally:
            await self._end(talk)

    async def _done(self, talk: _Talk) -> Message:
        message = await talk.next()
        _check(message)
        return message

    async def _end(self, talk: _Talk) -> None:
        """Have the model see that nobody waits any more, if it still runs, and wait a little for its end."""
        talk.call.unfollow(talk.follows)
        try:
            if not talk.ended:
                talk.since = time.monotonic()
                self._post(Kind.STOP, talk.number)
            with suppress(Exception):
                async with asyncio.timeout(STOP_PATIENCE_SECONDS):
                    while not talk.ended:
                        await talk.next()
        finally:
            if not talk.ended:
                talk.given_up = True
                self.given_up += 1
            await talk.desk.close()

    def _begin(self, send: Callable[[_Talk], None], call: Call) -> _Talk:
        if self._over:
            raise NotBegun(self._owner.lost)
        if self._own is None:
            self._own = LoopDesk(self._post, call.apart())
            self._start()
        number = self._last + 1
        self._last = number + len(members_of(call) or ())
        talk = self._talks[number] = _Talk(number, call, LoopDesk(self._post, call))
        talk.follows = partial(self._left, talk)
        call.follow(talk.follows)
        self._orders.put(partial(self._begun, send, talk))
        return talk

    def _left(self, talk: _Talk) -> None:
        """A member of the call, or the whole, was cancelled."""
        mark_cancelled(self._owner.page, talk.number, talk.call)
        if talk.call.cancelled:
            self._post(Kind.STOP, talk.number)

    def _arrived(self, message: Message) -> None:
        """What the process says."""
        talk = self._talks.get(message.call)
        try:
            if message.call == 0 and self._own is not None:
                self._own.serve(message)
            elif talk is None:
                if not refuse_late(self._post, message):
                    self._owner.kill("answered another call and was killed")
            elif not talk.desk.serve(message):
                if message.kind in (Kind.DONE, Kind.FAILED, Kind.UNLOADABLE):
                    self._ended(talk)
                talk.put(message)
        except (LookupError, TypeError, ValueError) as error:
            self._owner.kill(f"said what nobody understands ({error}) and was killed")

    def _ended(self, talk: _Talk) -> None:
        talk.ended = True
        self._talks.pop(talk.number, None)
        self.given_up -= talk.given_up

    def _gone(self) -> None:
        """Nothing more comes."""
        self._over = True
        if self._own is not None:
            self._own.leave()
        for talk in list(self._talks.values()):
            self._ended(talk)
            talk.put(unavailable(self._owner) if talk.sent else NotBegun(self._owner.lost))

    def _failed(self, talk: _Talk, error: Exception) -> None:
        """The call could not be handed over."""
        self._ended(talk)
        talk.put(error)

    def _post(self, kind: Kind, number: int, text: bytes = b"", answer: Any = None) -> None:
        self._orders.put(partial(self._send, kind, number, text, answer))

    # --- threads ---

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for work in (self._read, self._write):
            thread = threading.Thread(target=work, name=f"{self._owner.name} {work.__name__[1:]}s", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # It is closed: the server has stopped.
            self._loop.call_soon_threadsafe(work, *arguments)

    def _read(self) -> None:
        owner = self._owner
        with suppress(Gone):
            while True:
                message = owner.channel.receive()
                self._on_loop(self._arrived, message)
                del message
        owner.lost = owner.lost or owner.why_gone()
        # After what is being sent: a call that the process had must not be taken for one that it never got.
        self._orders.put(partial(self._on_loop, self._gone))

    def _write(self) -> None:
        while (order := self._orders.get()) is not None:
            with suppress(Gone):  # Who reads says so.
                order()
            del order

    def _begun(self, send: Callable[[_Talk], None], talk: _Talk) -> None:
        try:
            send(talk)
        except Gone:
            raise
        except Exception as error:
            self._on_loop(self._failed, talk, error)

    def _send_one(self, inputs: Inputs, talk: _Talk) -> None:
        text = dumps(call_fields(talk.call)) if self._with_call else b""
        self._call(talk, text, self._owner.channel.place(inputs))

    def _send_start(self, talk: _Talk) -> None:
        self._call(talk, dumps(call_fields(talk.call)), self._owner.channel.place({}), Kind.START)

    def _send_list(self, inputs: Sequence[Inputs], talk: _Talk) -> None:
        rows = [packed(one) for one in inputs]
        text = dumps({**call_fields(talk.call), "counts": [len(one) for one in rows]})
        self._call(talk, text, self._owner.channel.place_all(itertools.chain.from_iterable(rows)))

    def _call(self, talk: _Talk, text: bytes, placed: Placed, kind: Kind = Kind.CALL) -> None:
        self._owner.channel.send(kind, call=talk.number, text=text, placed=placed)
        talk.sent = True

    def _send(self, kind: Kind, number: int, text: bytes, answer: Any) -> None:
        channel = self._owner.channel
        try:
            text = text or beside_text(answer)
            placed = channel.place(answer) if isinstance(answer, Mapping) else None
            channel.send(kind, call=number, text=text, placed=placed)
        except Gone:
            raise
        except FrameError as error:
            refuse(self._post, number, Internal(f"the answer cannot be handed over: {error}"))
        except Exception as error:
            refuse(self._post, number, error)

    # --- care ---

    @property
    def count(self) -> int:
        """See `Calls`."""
        return len(self._talks)

    @property
    def run_seconds(self) -> float:
        """See `Calls`."""
        now = time.monotonic()
        return max((now - talk.since for talk in list(self._talks.values())), default=0.0)

    def tell_cancelled(self) -> None:
        """See `Calls`."""
        for talk in list(self._talks.values()):
            mark_cancelled(self._owner.page, talk.number, talk.call)

    def close(self) -> None:
        """See `Calls`."""
        if self._threads:
            reader, writer = self._threads
            reader.join()  # Its last order is for the writer.
            self._orders.put(None)
            writer.join()
        # They refer to this.
        self._threads.clear()


def _check(message: Message) -> None:
    """Raises what the model's code has raised."""
    if message.kind is Kind.UNLOADABLE:
        raise load_error(loads(message.text))
    if message.kind is not Kind.DONE:
        raise error_from(loads(message.text))
