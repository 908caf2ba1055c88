"""In the server: what a model asks for while its process runs a call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Cancelled, Internal, ServingError, Unavailable, is_told
from triglot.engine.processes.call_fields import asked_of
from triglot.engine.processes.channel import Message
from triglot.engine.processes.failures import description, error_fields
from triglot.engine.processes.frames import Kind
from triglot.engine.processes.values import dumps

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None] | None"]
"""Has work done: at once, on a thread that waits for it, or by a task of the loop."""


class Send(Protocol):
    """Sends a frame with this text, and an answer."""

    def __call__(self, kind: Kind, number: int, text: bytes = b"", answer: Any = None) -> None:
        """On any thread."""


class CallbackHandler:
    """Answers for one call, on the loop or on the thread that waits for it. To be closed with the call."""

    def __init__(self, send: Send, spawn: Spawn, call: Call) -> None:
        self._send = send
        self._spawn = spawn
        self._call = call
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Any] = {}
        self._pulls: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def serve(self, message: Message) -> bool:
        """Whether the message was a question, or the end of one."""
        if message.kind not in (Kind.METADATA, Kind.MODEL, Kind.STOP):
            return False
        fields = message.fields
        question = fields.pop("question")
        if message.kind is Kind.STOP:
            self._stop(question)
        elif message.kind is Kind.METADATA:
            call = self._member(fields["member"])
            self._send(Kind.REPLY, question, dumps(list(call.metadata.items())))
        else:
            self._ask(question, fields, message.tensors or {})
        return True

    def _member(self, member: int | None) -> Call:
        """The one that a question is asked on behalf of; None: the call itself."""
        return self._call if member is None else self._call.members[member]

    def _ask(self, question: int, fields: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        stream = fields.get("next")
        try:
            task = self._spawn(self._reply(question, fields, inputs))
        except asyncio.CancelledError as error:
            refuse(self._send, question, error)
            return
        if task is None:
            return
        self._asked[question] = task
        if stream is not None:
            self._pulls[stream] = task
        task.add_done_callback(partial(self._replied, question))

    def _replied(self, question: int, task: asyncio.Task[None]) -> None:
        self._asked.pop(question, None)
        if task.cancelled():
            # It may not even have begun. A thread of the model's may wait for it, whatever has become of the call.
            refuse(self._send, question, Cancelled("nobody waits for the call any more"))

    async def _reply(self, question: int, fields: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        try:
            answer = await self._answer(question, fields, inputs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # The process waits for a reply, whatever it is.
            refuse(self._send, question, error)
        else:
            self._send(Kind.REPLY, question, answer=answer)

    async def _answer(self, question: int, fields: dict[str, Any], inputs: Mapping[str, Any]) -> Any:
        """What another model answers; None at the end of a stream, and for what opens one."""
        if "next" in fields:
            answers = self._streams.get(fields["next"])
            if isinstance(answers, AsyncIterator):
                return await anext(answers, None)
            return None if answers is None else next(answers, None)
        call, stream = self._member(fields["member"]), fields.get("stream", False)
        answer = call.reach(call, asked_of(fields, inputs, stream=stream))
        if not stream:
            return await answer if inspect.isawaitable(answer) else answer
        self._streams[question] = answer if isinstance(answer, AsyncIterator) else iter(answer)
        return None

    def _stop(self, question: int) -> None:
        if (task := self._asked.get(question)) is not None:
            task.cancel()
        if question in self._streams:
            self._leave(self._close(question))

    def _leave(self, work: Coroutine[Any, Any, None]) -> None:
        if (task := self._spawn(work)) is not None:
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, stream: int) -> None:
        answers, pull = self._streams.pop(stream), self._pulls.pop(stream, None)
        if pull is not None and not pull.done():
            pull.cancel()
            await asyncio.wait([pull])
        with suppress(Exception):
            if isinstance(answers, AsyncIterator):
                await answers.aclose()  # type: ignore[attr-defined]  # It is a generator.
            else:
                answers.close()

    def leave(self) -> None:
        """As `close`, and not waiting for it."""
        self._leave(self.close())

    async def close(self) -> None:
        """End what the model has not waited for."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        for stream in list(self._streams):
            await self._close(stream)


def refuse(send: Send, question: int, error: BaseException) -> None:
    """Say that what was asked for cannot be had."""
    send(Kind.REFUSAL, question, dumps(error_fields(_readable(error))))


def refuse_late(send: Send, message: Message) -> bool:
    """Whether it was a question, or the end of one, on behalf of a call that has ended."""
    if message.kind in (Kind.METADATA, Kind.MODEL):
        late = Unavailable("the call has ended: it can reach no other model any more")
        refuse(send, message.fields["question"], late)
    return message.kind in (Kind.METADATA, Kind.MODEL, Kind.STOP)


def _readable(error: BaseException) -> ServingError:
    """What a model may read of an error of another."""
    return error if is_told(error) else Internal(f"{type(error).__name__}: {description(error)}")
