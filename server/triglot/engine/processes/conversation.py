"""In the process: one call of `infer` where calls take turns, and what it asks the server for."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from typing import Any

from triglot.core.call import ModelCall, ModelTask, Reach
from triglot.core.errors import Unavailable
from triglot.engine.processes.answers import answer_of, aside, rows_of, text_of
from triglot.engine.processes.arena import Placed
from triglot.engine.processes.channel import Channel, Message
from triglot.engine.processes.failures import error_of
from triglot.engine.processes.frames import Kind
from triglot.engine.processes.page import Page
from triglot.engine.processes.remote_call import asked_fields, inputs_of, streams
from triglot.engine.processes.values import dumps, loads


class Conversation:
    """The model's side of one call; any thread of the model's may speak, one at a time.

    Strategy: the server listens while its thread waits for the answer, and replies to each frame in its order. An
    answer of a stream is sent, and the next one is made while the server passes it on: what the server says to it
    is read before anything else is sent.
    """

    def __init__(self, channel: Channel, page: Page, number: int, model: str, own: Reach) -> None:
        self.own = own
        self._channel = channel
        self._page = page
        self.number = number
        self._model = model
        self._turn = threading.Lock()
        self._owed = 0
        self._wanted = True
        self._over = False
        self._streams = itertools.count(1)

    def is_cancelled(self, number: int) -> bool:
        """Whether the server has said so of this call, or of a member of it."""
        return self._page.is_cancelled(number)

    def answer(self, answer: object, *, at_once: bool = False, member: int | None = None) -> bool:
        """Send one answer of several; False when nobody reads any more, as far as known. `at_once`: as of now."""
        with self._turn:
            self._settle()
            if self._over or not self._wanted or self.is_cancelled(self.number):
                return False
            placed, fields = self._channel.place_all(rows_of(answer, self._model)), aside(answer)
            del answer
            if member is not None:
                fields["member"] = member
            text = text_of(fields, self._model)
            self._channel.send(Kind.ANSWER, call=self.number, text=text, placed=placed)
            self._owed += 1
            if at_once:
                self._settle()
            return self._wanted

    def _settle(self) -> None:
        """Read what the server owes."""
        while self._owed:
            self._wanted &= self._channel.receive().kind is Kind.GO_ON
            self._owed -= 1

    def placed(self, answer: object) -> tuple[Placed, bytes]:
        """What `infer` gave, ready to be sent. Raises `Internal` for what cannot be, for the model's author."""
        text = text_of(aside(answer), self._model)
        return self._channel.place_all(rows_of(answer, self._model)), text

    def finish(self, member: int | None = None) -> None:
        """Say that no more answers come."""
        with self._turn:
            self._settle()
            if not self._over:
                self._channel.send(Kind.FINISHED, call=self.number, text=_of(member))

    def metadata(self, member: int | None) -> Iterable[tuple[str, str | bytes]]:
        """Of the call that is executed."""
        message = self._asked(Kind.METADATA, _of(member))
        return [] if message is None else [(name, value) for name, value in loads(message.text)]

    def model(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        """What another model answers; code on a loop awaits it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._stream(asked, member) if streams(asked) else self._other_model(asked, member)
        if streams(asked):
            return self._stream_on(loop, asked, member)
        return loop.run_in_executor(None, self._other_model, asked, member)

    def _other_model(self, asked: ModelCall | ModelTask, member: int | None, stream: int = 0) -> Any:
        return self._reply({**asked_fields(asked, member), "stream": stream}, inputs_of(asked))

    def _stream(self, asked: ModelCall | ModelTask, member: int | None) -> Generator[Any, None, None]:
        """The answers one by one; closing the generator ends them."""
        number = next(self._streams)
        self._other_model(asked, member, number)
        try:
            while (answer := self._reply({"stream": number, "close": False})) is not None:
                yield answer
        finally:
            if not self._over:
                self._reply({"stream": number, "close": True})

    async def _stream_on(
        self, loop: asyncio.AbstractEventLoop, asked: ModelCall | ModelTask, member: int | None
    ) -> AsyncGenerator[Any, None]:
        answers = self._stream(asked, member)
        try:
            while (answer := await loop.run_in_executor(None, next, answers, None)) is not None:
                yield answer
        finally:
            await loop.run_in_executor(None, answers.close)

    def _reply(self, fields: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Any:
        message = self._asked(Kind.MODEL, dumps(fields), tensors)
        if message is None:
            raise Unavailable("the call has ended: it can reach no other model any more")
        if message.kind is Kind.REFUSAL:
            raise error_of(message.fields)
        return answer_of(message)

    def _asked(self, kind: Kind, text: bytes = b"", tensors: Mapping[str, Any] | None = None) -> Message | None:
        with self._turn:
            self._settle()
            if self._over:
                return None
            placed = None if tensors is None else self._channel.place(tensors)
            self._channel.send(kind, call=self.number, text=text, placed=placed)
            return self._channel.receive()

    def end(self) -> None:
        """No more of this call; the channel is the process's again."""
        with self._turn:
            self._settle()
            self._over = True


def _of(member: int | None) -> bytes:
    return b"" if member is None else dumps({"member": member})
