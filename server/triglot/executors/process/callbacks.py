"""In the server: answers the questions of a model, for metadata or other models, while its process runs a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Cancelled, Internal, ServingError, Unavailable, is_serving_error
from triglot.executors.process.call_fields import asked_of
from triglot.executors.process.channel import Message
from triglot.executors.process.failures import description, error_fields
from triglot.executors.process.frames import Kind
from triglot.executors.process.values import dumps

_NOBODY = "the call was cancelled"
KINDS = (Kind.METADATA, Kind.MODEL, Kind.GO_ON, Kind.STOP)
"""Kinds of a process's frames that a `CallbackHandler` serves."""


class Send(Protocol):
    """Schedules a frame to be sent to the process, with this text and the tensors of `answer`."""

    def __call__(self, kind: Kind, number: int, text: bytes = b"", answer: Any = None) -> None:
        """On any thread; `number` is that of the question."""


class CallbackHandler:
    """Answers the questions of one call, on the loop: those for other models in tasks, which `close` cancels."""

    def __init__(self, send: Send, call: Call) -> None:
        self._send = send
        self._call = call
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._taken: dict[int, asyncio.Future[None]] = {}

    def serve(self, message: Message) -> None:
        """Handle a frame of `KINDS`. Raises `LookupError`, `TypeError` and `ValueError` for an invalid one."""
        fields = message.fields
        question = fields.pop("question")
        if message.kind is Kind.STOP:
            if (task := self._tasks.get(question)) is not None:
                task.cancel()
        elif message.kind is Kind.GO_ON:
            if (taken := self._taken.pop(question, None)) is None:
                refuse(self._send, question, Cancelled(_NOBODY))
            elif not taken.done():
                taken.set_result(None)
        elif message.kind is Kind.METADATA:
            call = self._member(fields["member"])
            self._send(Kind.REPLY, question, dumps(list(call.metadata.items())))
        else:
            work = self._reply(question, self._member(fields.pop("member")), fields, message.tensors or {})
            task = self._tasks[question] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(partial(self._replied, question))

    def _member(self, member: int | None) -> Call:
        """Returns the member with this index, on whose behalf a question is asked; None: the call itself."""
        return self._call if member is None else self._call.members[member]

    async def _reply(self, question: int, call: Call, fields: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        try:
            stream = fields.pop("stream", False)
            answer = call.reach(call, asked_of(fields, inputs, stream=stream))
            if stream:
                async with aclosing(answer) as answers:
                    async for answer in answers:
                        await self._pass_on(question, answer)
                answer = None
            else:
                answer = await answer
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # The process needs a reply in any case.
            refuse(self._send, question, error)
        else:
            self._send(Kind.REPLY, question, answer=answer)

    async def _pass_on(self, question: int, answer: object) -> None:
        """Send one response of a stream, and wait until the process asks for the next one."""
        taken = self._taken[question] = asyncio.get_running_loop().create_future()
        self._send(Kind.ANSWER, question, answer=answer)
        del answer
        await taken

    def _replied(self, question: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(question, None)
        self._taken.pop(question, None)
        if task.cancelled():
            # Perhaps before its first step. A thread of the model's may wait for the reply even after the call.
            refuse(self._send, question, Cancelled(_NOBODY))

    def close(self) -> None:
        """Cancel the questions that are still open."""
        for task in list(self._tasks.values()):
            task.cancel()


def refuse(send: Send, question: int, error: BaseException) -> None:
    """Answer a question with an error."""
    send(Kind.REFUSAL, question, dumps(error_fields(_readable(error))))


def refuse_late(send: Send, message: Message) -> None:
    """Answer a question of a call that has ended with an error."""
    if message.kind is not Kind.STOP:
        late = Unavailable("the call has ended: it can no longer call other models")
        refuse(send, message.fields["question"], late)


def _readable(error: BaseException) -> ServingError:
    """Returns an error of another model as the asking model sees it."""
    return error if is_serving_error(error) else Internal(f"{type(error).__name__}: {description(error)}")
