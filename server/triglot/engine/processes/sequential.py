"""In the server: the calls of a process that runs one after the other."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Sequence
from typing import Any

from triglot.core.call import BatchCall, Call
from triglot.engine.processes.answers import answer_of, list_of
from triglot.engine.processes.arena import Placed, packed
from triglot.engine.processes.channel import Gone, Message, NotSent
from triglot.engine.processes.desk import Desk
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.owner import NotBegun, Owner, error_from, load_error, mark_cancelled, unavailable
from triglot.engine.processes.remote_call import call_fields, members_of
from triglot.engine.processes.values import dumps, loads
from triglot.engine.work import Inputs


class SequentialCalls:
    """One thread at a time calls. `with_call`: whether the model's code gets the call."""

    def __init__(self, owner: Owner, *, with_call: bool) -> None:
        self._owner = owner
        self._with_call = with_call
        self._channel = owner.channel
        self._last = 0
        self._current: tuple[int, Call] | None = None
        self._runs_since = math.inf

    def run(self, inputs: Inputs, call: Call) -> Any:
        """What `infer` returns; what it gives to `call.respond` before goes there.

        Raises `NotBegun`, `Unavailable` when the process ends or hangs meanwhile, and what the model raises.
        """
        with self._conversation(self._one(inputs, call), call) as desk:
            return answer_of(self._until_done(desk, call))

    def run_list(self, inputs: Sequence[Inputs], call: BatchCall) -> list[Any]:
        """What `infer_batch` returns: an answer, or an exception, for each member. Raises as `run`."""
        with self._conversation(self._list(inputs, call), call) as desk:
            return list_of(self._until_done(desk, call), error_from)

    def start(self, call: Call) -> None:
        """Have `start_instance` run. Raises `ModelLoadError`, and as `run`."""
        begin = self._channel.place({}), dumps(call_fields(call))
        with self._conversation(begin, call, Kind.START) as desk:
            self._until_done(desk, call)

    def _until_done(self, desk: Desk, call: Call) -> Message:
        while (message := self._next(desk)).kind in (Kind.ANSWER, Kind.FINISHED):
            member = _member(call, message)
            if message.kind is Kind.FINISHED:
                member.finish()
            else:
                answer = answer_of(message)
                del message
                self._go_on(Kind.GO_ON if member.respond(answer) else Kind.STOP)
                del answer
        return self._done(message)

    def stream(self, inputs: Inputs, call: Call) -> Generator[Any, None, None]:
        """The answers that `infer` yields. Raises as `run`; closing the generator closes the model's."""
        with self._conversation(self._one(inputs, call), call) as desk:
            del inputs
            while (message := self._next(desk)).kind is Kind.ANSWER:
                answer = answer_of(message)
                del message
                self._runs_since = math.inf  # It waits for the reader.
                try:
                    yield answer
                except GeneratorExit:
                    del answer
                    self._stop(desk)
                    raise
                del answer
                self._go_on(Kind.GO_ON)
            self._done(message)

    def _stop(self, desk: Desk) -> None:
        """Have the model's generator closed, and wait for that."""
        self._go_on(Kind.STOP)
        while (message := self._next(desk)).kind is Kind.ANSWER:
            self._channel.send(Kind.STOP)
        self._done(message)

    def _go_on(self, kind: Kind) -> None:
        """Have the model run on after an answer."""
        self._runs_since = time.monotonic()
        self._channel.send(kind)

    def _one(self, inputs: Inputs, call: Call) -> tuple[Placed, bytes]:
        text = dumps(call_fields(call)) if self._with_call else b""
        return self._channel.place(inputs), text

    def _list(self, inputs: Sequence[Inputs], call: Call) -> tuple[Placed, bytes]:
        rows = [packed(one) for one in inputs]
        text = dumps({**call_fields(call), "counts": [len(one) for one in rows]})
        return self._channel.place_all(itertools.chain.from_iterable(rows)), text

    def _conversation(self, begin: tuple[Placed, bytes], call: Call, kind: Kind = Kind.CALL) -> _Conversation:
        self._begin(kind, *begin, call)
        return _Conversation(self, Desk(self._channel, call))

    def end(self, error: BaseException | None) -> None:
        """The conversation is over. Raises `Unavailable` where that is because the process is gone."""
        owner = self._owner
        gone = isinstance(error, Gone | FrameError)
        if gone:
            owner.lost = owner.lost or owner.why_gone()
        if self._current is not None and not owner.lost:
            owner.kill("was left alone with a call")
        self._current, self._runs_since = None, math.inf
        if gone:
            raise unavailable(owner) from None

    def _done(self, message: Message) -> Message:
        """What the model's code has returned. Raises what that has raised."""
        if message.kind not in (Kind.DONE, Kind.FAILED, Kind.UNLOADABLE):
            raise Gone(f"unexpected {message.kind.name}")
        self._current, self._runs_since = None, math.inf
        if message.kind is Kind.DONE:
            return message
        fields = loads(message.text)
        raise load_error(fields) if message.kind is Kind.UNLOADABLE else error_from(fields)

    def _begin(self, kind: Kind, placed: Placed, text: bytes, call: Call) -> None:
        number = self._last + 1
        self._last = number + len(members_of(call) or ())
        owner = self._owner
        try:
            self._channel.send(kind, call=number, text=text, placed=placed)
        except NotSent:
            owner.lost = owner.lost or owner.why_gone()
            raise NotBegun(owner.lost) from None
        self._current, self._runs_since = (number, call), time.monotonic()

    def _next(self, desk: Desk) -> Message:
        """The next message that is no question. Raises `Gone`."""
        while True:
            message = self._channel.receive()
            if self._current is not None and message.call != self._current[0]:
                self._owner.kill("answered another call and was killed")
                raise Gone(self._owner.lost)
            if not desk.serve(message):
                return message

    @property
    def count(self) -> int:
        """See `Calls`."""
        return int(self._current is not None)

    @property
    def run_seconds(self) -> float:
        """See `Calls`."""
        return max(0.0, time.monotonic() - self._runs_since)

    def tell_cancelled(self) -> None:
        """See `Calls`."""
        current = self._current
        if current is not None:
            mark_cancelled(self._owner.page, *current)

    def close(self) -> None:
        """See `Calls`."""


class _Conversation:
    """A `with` block is one, and has its desk."""

    __slots__ = ("_calls", "_desk")  # As of a `Loan`.

    def __init__(self, calls: SequentialCalls, desk: Desk) -> None:
        self._calls = calls
        self._desk = desk

    def __enter__(self) -> Desk:
        return self._desk

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        try:
            self._calls.end(error)
        finally:
            self._desk.close()


def _member(call: Call, message: Message) -> Call:
    """The one that an answer of several is for."""
    fields = message.fields if message.text else None
    return call if fields is None or "member" not in fields else call.members[fields["member"]]
