"""In the server: what `async def` code asks for while its process runs a call; it may ask much at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Cancelled, Unavailable
from triglot.engine.processes.channel import Message
from triglot.engine.processes.desk import member_of, told
from triglot.engine.processes.failures import error_fields
from triglot.engine.processes.frames import Kind
from triglot.engine.processes.remote_call import asked_of
from triglot.engine.processes.values import dumps

Post = Callable[[Kind, int, bytes, Any], None]
"""Sends a frame of this kind and number: its text, and the answer whose tensors it has."""


class LoopDesk:
    """Answers for one call, on the loop. To be closed with the call."""

    def __init__(self, post: Post, call: Call) -> None:
        self._post = post
        self._call = call
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, AsyncGenerator[Any, None]] = {}
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
            call = member_of(self._call, fields["member"])
            self._post(Kind.REPLY, question, dumps(list(call.metadata.items())), None)
        else:
            self._ask(question, fields, message.tensors or {})
        return True

    def _ask(self, question: int, fields: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        stream = fields.get("next")
        task = asyncio.get_running_loop().create_task(self._reply(question, fields, inputs))
        self._asked[question] = task
        if stream is not None:
            self._pulls[stream] = task
        task.add_done_callback(partial(self._asked_no_more, question))

    def _asked_no_more(self, question: int, task: asyncio.Task[None]) -> None:
        self._asked.pop(question, None)
        if task.cancelled():
            # It may not even have begun. A thread of the model's may wait for it, whatever has become of the call.
            refuse(self._post, question, Cancelled("nobody waits for the call any more"))

    async def _reply(self, question: int, fields: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        try:
            answer = await self._answer(question, fields, inputs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # The process waits for a reply, whatever it is.
            refuse(self._post, question, error)
        else:
            self._post(Kind.REPLY, question, b"", answer)

    async def _answer(self, question: int, fields: dict[str, Any], inputs: Mapping[str, Any]) -> Any:
        """What another model answers; None at the end of a stream, and for what opens one."""
        if "next" in fields:
            answers = self._streams.get(fields["next"])
            return None if answers is None else await anext(answers, None)
        call, stream = member_of(self._call, fields["member"]), fields.get("stream", False)
        answer = call.reach(call, asked_of(fields, inputs, stream=stream))
        if not stream:
            return await answer
        self._streams[question] = answer
        return None

    def _stop(self, question: int) -> None:
        if (task := self._asked.get(question)) is not None:
            task.cancel()
        if question in self._streams:
            closing = asyncio.get_running_loop().create_task(self._close(question))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(self, stream: int) -> None:
        answers, pull = self._streams.pop(stream), self._pulls.pop(stream, None)
        if pull is not None and not pull.done():
            pull.cancel()
            await asyncio.wait([pull])
        with suppress(Exception):
            await answers.aclose()

    def leave(self) -> None:
        """As `close`, and not waiting for it."""
        closing = asyncio.get_running_loop().create_task(self.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End what the model has not waited for."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        for stream in list(self._streams):
            await self._close(stream)


def refuse(post: Post, question: int, error: BaseException) -> None:
    """Say that what was asked for cannot be had."""
    post(Kind.REFUSAL, question, dumps(error_fields(told(error))), None)


def refuse_late(post: Post, message: Message) -> bool:
    """Whether it was a question, or the end of one, on behalf of a call that has ended."""
    if message.kind in (Kind.METADATA, Kind.MODEL):
        late = Unavailable("the call has ended: it can reach no other model any more")
        refuse(post, message.fields["question"], late)
    return message.kind in (Kind.METADATA, Kind.MODEL, Kind.STOP)
