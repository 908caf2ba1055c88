"""In the process: one call of `infer`, and what it asks the server for."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call, ModelCall
from triglot.core.errors import Internal, Unavailable
from triglot.core.request_scheduling import PLAIN, Scheduling
from triglot.engine.processes.arena import Placed
from triglot.engine.processes.channel import Channel, Message
from triglot.engine.processes.failures import error_of
from triglot.engine.processes.frames import Kind
from triglot.engine.processes.page import Page
from triglot.engine.processes.values import dumps, loads


class Conversation:
    """The model's side of one call; any thread of the model's may speak, one at a time.

    Strategy: the server listens while its thread waits for the answer, and replies to each frame in its order. An
    answer of a stream is sent, and the next one is made while the server passes it on: what the server says to it
    is read before anything else is sent.
    """

    def __init__(self, channel: Channel, page: Page, number: int, model: str) -> None:
        self._channel = channel
        self._page = page
        self.number = number
        self._model = model
        self._turn = threading.Lock()
        self._owed = 0
        self._wanted = True
        self._over = False
        self._streams = itertools.count(1)

    @property
    def cancelled(self) -> bool:
        """Whether the server has said so."""
        return self._page.cancelled == self.number

    def answer(self, answer: object, *, at_once: bool = False) -> bool:
        """Send one answer of several; False when nobody reads any more, as far as known. `at_once`: as of now."""
        with self._turn:
            self._settle()
            if self._over or not self._wanted or self.cancelled:
                return False
            placed = self.placed(answer)
            del answer
            self._channel.send(Kind.ANSWER, call=self.number, placed=placed)
            self._owed += 1
            if at_once:
                self._settle()
            return self._wanted

    def _settle(self) -> None:
        """Read what the server owes."""
        while self._owed:
            self._wanted &= self._channel.receive().kind is Kind.GO_ON
            self._owed -= 1

    def placed(self, answer: object) -> Placed:
        """What `infer` gave, ready to be sent. Raises `Internal` for what cannot be, for the model's author."""
        if not isinstance(answer, Mapping):
            kind = type(answer).__name__
            raise Internal(f"model '{self._model}' returned {kind}, expected a dict of outputs by name")
        try:
            return self._channel.place(answer)
        except TypeError as error:
            raise Internal(f"model '{self._model}' returned output {error}") from None

    def finish(self) -> None:
        """Say that no more answers come."""
        with self._turn:
            self._settle()
            if not self._over:
                self._channel.send(Kind.FINISHED, call=self.number)

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Of the call that is executed."""
        message = self._asked(Kind.METADATA)
        return [] if message is None else [(name, value) for name, value in loads(message.text)]

    def model(self, _: Call, asked: ModelCall) -> Any:
        """`Call.reach`: what another model answers; code on a loop awaits it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._stream(asked) if asked.stream else self._other_model(asked)
        if asked.stream:
            return self._stream_on(loop, asked)
        return loop.run_in_executor(None, self._other_model, asked)

    def _other_model(self, asked: ModelCall, stream: int = 0) -> Any:
        fields = {
            "model": asked.model,
            "version": asked.version,
            "outputs": list(asked.outputs),
            "signature_name": asked.signature_name,
            "parameters": None if asked.parameters is None else dict(asked.parameters),
            "stream": stream,
        }
        return self._reply(fields, asked.inputs)

    def _stream(self, asked: ModelCall) -> Generator[Any, None, None]:
        """The answers one by one; closing the generator ends them."""
        number = next(self._streams)
        self._other_model(asked, number)
        try:
            while (answer := self._reply({"stream": number, "close": False})) is not None:
                yield answer
        finally:
            if not self._over:
                self._reply({"stream": number, "close": True})

    async def _stream_on(self, loop: asyncio.AbstractEventLoop, asked: ModelCall) -> AsyncGenerator[Any, None]:
        answers = self._stream(asked)
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
        return message.tensors

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


class RemoteCall(Call):
    """A call as the model sees it in the process."""

    __slots__ = ("_conversation", "_members")

    def __init__(self, conversation: Conversation, fields: Mapping[str, Any]) -> None:
        super().__init__(fields.get("deadline"), conversation.metadata)
        self._conversation = conversation
        self.request_id = fields.get("id", "")
        self.signature_name = fields.get("signature", "")
        self.parameters = fields.get("parameters", {})
        self.model_name, self.model_version = fields.get("model", ""), fields.get("version", 0)
        self.batch_size = fields.get("batch", 1)
        self.size = fields.get("size", 0)
        if scheduling := fields.get("scheduling"):
            self.scheduling = Scheduling(*scheduling)
        self.respond = partial(conversation.answer, at_once=True)
        self.finish = conversation.finish
        self.reach = conversation.model
        members = fields.get("members")
        self._members = members and tuple(RemoteCall(conversation, member) for member in members)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._conversation.cancelled or super().cancelled

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return self._members or (self,)

    def child(self) -> Call:
        """A call of its own for one of several requests that came on this one."""
        return RemoteCall(self._conversation, {**call_fields(self), "deadline": self.deadline})


def call_fields(call: Call) -> dict[str, Any]:
    """In the server: what a process is told of a call; what is usual is left out."""
    fields: dict[str, Any] = {
        "id": call.request_id,
        "signature": call.signature_name,
        "parameters": call.parameters,
        "model": call.model_name,
        "version": call.model_version,
        "batch": call.batch_size,
        "size": call.size,
        "deadline": call.deadline,
    }
    if call.scheduling is not PLAIN:
        one = call.scheduling
        fields["scheduling"] = (
            one.priority,
            one.timeout,
            one.sequence_id,
            one.sequence_start,
            one.sequence_end,
        )
    members = call.members
    if len(members) != 1 or members[0] is not call:
        fields["members"] = [call_fields(member) for member in members]
    return {name: value for name, value in fields.items() if value}
