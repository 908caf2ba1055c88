"""In the process: `async def` code runs what the server sends, as many calls at the same time as come."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask, Reach
from triglot.core.errors import Internal
from triglot.core.model import Model
from triglot.engine.batch import check_answers
from triglot.engine.declarations import function_of, takes_call
from triglot.engine.processes.answers import answer_of, aside, grouped, list_rows, rows_of, text_of
from triglot.engine.processes.arena import Placed
from triglot.engine.processes.channel import Channel, Gone, Message
from triglot.engine.processes.failures import error_fields, error_of, failure_fields
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.in_turn import failed
from triglot.engine.processes.own_loop import OwnLoop, Running
from triglot.engine.processes.page import Page
from triglot.engine.processes.remote_call import RemoteCall, asked_fields, inputs_of, streams
from triglot.engine.processes.values import dumps, loads

_FIRST_QUESTION = 2**63
"""What the process asks has numbers of its own, apart from those of the server's calls."""


class Talk:
    """The model's side of one call, on the loop or, for what it asks, on any thread.

    Strategy: the main thread reads whatever comes, and hands each message to who expects its number. An answer of
    a stream is sent, and the next one is made while the server passes it on.
    """

    def __init__(self, server: AtOnce, number: int) -> None:
        self._server = server
        self.number = number
        self._owed: Future[Message] | None = None
        self.stopped = False

    @property
    def own(self) -> Reach:
        """The model's own way to others."""
        return self._server.own

    def is_cancelled(self, number: int) -> bool:
        """Whether the server has said so of this call, or of a member of it."""
        return self.stopped or self._server.page.is_cancelled(number)

    def answer(self, answer: object, *, at_once: bool = False, member: int | None = None) -> bool:
        """Nobody listens to what `async def` code pushes."""
        return False

    def finish(self, member: int | None = None) -> None:
        """Nothing: such code yields."""

    async def send(self, answer: object) -> None:
        """One answer of several, once the one before was taken."""
        owed, self._owed = self._owed, None
        if owed is not None:
            await asyncio.wrap_future(owed)
        name = self._server.name
        rows, text = rows_of(answer, name), text_of(aside(answer), name)
        self._owed = self._server.expect(self.number)
        self._server.send(Kind.ANSWER, self.number, text, self._server.channel.place_all(rows))

    def metadata(self, member: int | None) -> Iterable[tuple[str, str | bytes]]:
        """Of the call that is executed."""
        _, reply = self._ask(Kind.METADATA, {"member": member})
        message = reply.result()
        return [(name, value) for name, value in loads(message.text)] if message.kind is Kind.REPLY else []

    def model(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        """What another model answers; code on a loop awaits it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._stream(asked, member) if streams(asked) else self._other(asked, member)
        if streams(asked):
            return self._stream_on_loop(asked, member)
        task = loop.create_task(self._other_on_loop(asked, member))
        task.add_done_callback(_look_at)
        return task

    def _ask(
        self, kind: Kind, fields: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> tuple[int, Future[Message]]:
        """The question's number, and the reply that comes."""
        placed = None if tensors is None else self._server.channel.place(tensors)
        question = next(self._server.questions)
        reply = self._server.expect(question)
        try:
            self._server.send(kind, self.number, dumps({**fields, "question": question}), placed)
        except BaseException:
            self._server.forget(question)
            raise
        return question, reply

    def _other(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        _, reply = self._ask(Kind.MODEL, asked_fields(asked, member), inputs_of(asked))
        return _answered(reply.result())

    async def _other_on_loop(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        question, reply = self._ask(Kind.MODEL, asked_fields(asked, member), inputs_of(asked))
        return await self._until(question, reply)

    async def _until(self, question: int, reply: Future[Message]) -> Any:
        try:
            return _answered(await asyncio.wrap_future(reply))
        except asyncio.CancelledError:
            self._leave(question)
            raise

    def _leave(self, question: int) -> None:
        """Nobody waits for this any more."""
        self._server.send(Kind.STOP, self.number, dumps({"question": question}))

    def _open(self, asked: ModelCall | ModelTask, member: int | None) -> tuple[int, Future[Message]]:
        return self._ask(Kind.MODEL, {**asked_fields(asked, member), "stream": True}, inputs_of(asked))

    def _stream(self, asked: ModelCall | ModelTask, member: int | None) -> Generator[Any, None, None]:
        """The answers one by one; closing the generator ends them."""
        stream, reply = self._open(asked, member)
        try:
            _answered(reply.result())
            while True:
                _, reply = self._ask(Kind.MODEL, {"next": stream})
                if (answer := _answered(reply.result())) is None:
                    return
                yield answer
                del answer
        finally:
            self._leave(stream)

    async def _stream_on_loop(self, asked: ModelCall | ModelTask, member: int | None) -> AsyncGenerator[Any, None]:
        stream, reply = self._open(asked, member)
        try:
            _answered(await asyncio.wrap_future(reply))
            while True:
                _, reply = self._ask(Kind.MODEL, {"next": stream})
                if (answer := _answered(await asyncio.wrap_future(reply))) is None:
                    return
                yield answer
                del answer
        finally:
            self._leave(stream)


def _own(talk: Talk, _: Call, asked: ModelCall | ModelTask) -> Any:
    return talk.model(asked, None)


def _answered(message: Message) -> Any:
    if message.kind is Kind.REFUSAL:
        raise error_of(message.fields)
    return answer_of(message)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Of a task that nobody awaited there is nothing to tell."""
    if not task.cancelled():
        task.exception()


class AtOnce:
    """Serves calls of a model whose code is `async def`. `serve` belongs to the main thread, which receives."""

    def __init__(self, channel: Channel, page: Page, name: str, model: Model, file: Path) -> None:
        self.channel = channel
        self.page = page
        self.name = name
        self.questions = itertools.count(_FIRST_QUESTION)
        self.own = partial(_own, Talk(self, 0))
        self._loop = OwnLoop(name, partial(os._exit, 1))
        self._start = model.start_instance
        self._file = file
        self._infer = model.infer
        self._function = function_of(model)
        self._infer_batch = model.infer_batch
        self._with_call = takes_call(model.infer)
        self._expected: dict[int, Future[Message]] = {}
        self._running: dict[int, tuple[Talk, Running]] = {}
        self._pid = os.getpid()

    def serve(self, message: Message) -> None:
        """Begin a call, end one, or hand a message to who waits for it."""
        if message.kind is Kind.CALL:
            self._begin(message)
            return
        if message.kind is Kind.START:
            thread = threading.Thread(target=self._started, args=(message,), name="start", daemon=True)
            thread.start()
            return
        if message.kind is Kind.STOP and (found := self._running.get(message.call)) is not None:
            talk, running = found
            talk.stopped = True
            running.cancel()
        if (expected := self._expected.pop(message.call, None)) is not None:
            expected.set_result(message)

    def expect(self, number: int) -> Future[Message]:
        """On any thread: what comes for this number."""
        future = self._expected[number] = Future()
        future.set_running_or_notify_cancel()
        return future

    def forget(self, number: int) -> None:
        """Nothing comes for it."""
        self._expected.pop(number, None)

    def send(self, kind: Kind, number: int, text: bytes = b"", placed: Placed | None = None) -> None:
        """On any thread. Raises `FrameError` for too much."""
        if os.getpid() != self._pid:
            os._exit(1)  # The model has forked, and only one of the two has the connection.
        try:
            self.channel.send(kind, call=number, text=text, placed=placed)
        except Gone:
            os._exit(1)

    def _started(self, message: Message) -> None:
        """On a thread of its own."""
        number = message.call
        try:
            self._start(RemoteCall(Talk(self, number), message.fields))
        except BaseException as error:
            kind, text = failed(Kind.START, error, self._file)
            self.send(kind, number, text)
        else:
            self.send(Kind.DONE, number)

    def _begin(self, message: Message) -> None:
        talk = Talk(self, message.call)
        running = self._loop.begin(self._result(message, talk))
        self._running[message.call] = talk, running
        running.done.add_done_callback(partial(self._ended, message.call))

    def _ended(self, number: int, done: Future[Any]) -> None:
        """On the loop, as a rule."""
        del self._running[number]
        self.forget(number)
        kind, text, placed = Kind.DONE, b"", None
        try:
            if (ready := done.result()) is not None:
                rows, text = ready
                placed = self.channel.place_all(rows)
        except BaseException as error:  # A model that calls exit() fails this call, and goes on.
            kind, text = Kind.FAILED, dumps(failure_fields(error))
        try:
            self.send(kind, number, text, placed)
        except FrameError as error:
            told = Internal(f"model '{self.name}' returned outputs that cannot be handed over: {error}")
            self.send(Kind.FAILED, number, dumps(error_fields(told)))

    async def _result(self, message: Message, talk: Talk) -> Any:
        """The last answer, ready to be placed, and what belongs to it; None where there is none."""
        fields = message.fields or {}
        if "counts" in fields:
            return await self._list(message, fields, talk)
        inputs = message.tensors or {}
        del message
        result = self._function(inputs, RemoteCall(talk, fields if self._with_call else {}))
        del inputs
        if inspect.isasyncgenfunction(self._infer):
            async with aclosing(result) as answers:
                async for answer in answers:
                    await talk.send(answer)
            return None
        answer = await result
        return None if answer is None else (rows_of(answer, self.name), text_of(aside(answer), self.name))

    async def _list(self, message: Message, fields: Mapping[str, Any], talk: Talk) -> Any:
        assert self._infer_batch is not None
        calls = RemoteCall(talk, fields).members
        inputs = list(grouped(message.named or (), fields["counts"]))
        del message
        answers = self._infer_batch(inputs, calls)
        del inputs
        answers = check_answers(await answers if inspect.isawaitable(answers) else answers, len(calls))
        rows, beside = list_rows(answers, self.name)
        return rows, text_of({"answers": beside}, self.name)
