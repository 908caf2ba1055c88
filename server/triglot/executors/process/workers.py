"""`Worker`, which runs the calls that the server sends. In the model's process."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, Internal, Unavailable
from triglot.core.tensor import Array
from triglot.executors.batch import check_answers
from triglot.executors.process.answers import grouped, list_rows, non_tensor_fields, rows_of, text_of
from triglot.executors.process.blocking import run_blocking
from triglot.executors.process.channel import Message
from triglot.executors.process.failures import error_fields, failure_fields, load_failure_fields
from triglot.executors.process.frames import FrameError, Kind
from triglot.executors.process.session import CallState, RemoteCall, Session
from triglot.executors.process.shared_memory import Row
from triglot.executors.process.values import dumps
from triglot.executors.work import function_of, reason_to_skip, takes_call
from triglot.model.model import Model, is_async

log = logging.getLogger(__name__)

Ready = tuple[list[Row], bytes]
"""A response ready to be sent: its tensors, and the JSON of its other fields."""


class Worker:
    """Runs the calls of one model, whose file is `file`; `serve` is called on the main thread.

    Strategy: a call is one coroutine. That of plain code never suspends; the main thread runs one after the other.
    Those of `async def` code run on an event loop on a thread of its own, which keeps running between calls, as
    the server's would.
    """

    def __init__(self, session: Session, model: Model, file: Path) -> None:
        self._session = session
        self._name = session.name
        self._file = file
        self._function = function_of(model)
        self._infer_batch = model.infer_batch
        self._start = model.start_instance
        self._no_call = None if takes_call(model.infer) else Call()
        self._current: CallState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        session.own = self._reach
        session.serial = not is_async(model.infer)
        if not session.serial:
            self._current = CallState(session, Message(Kind.CALL, 0, b"", None))
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, args=(self._loop,), name="loop", daemon=True).start()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the process ends: without it, calls would wait forever."""
        while not loop.is_closed():
            try:
                loop.run_forever()  # Returns if the model's code calls exit(), or stops the loop.
            except (SystemExit, KeyboardInterrupt) as error:
                log.error(
                    "%s: the model's code raised %s in its event loop; the loop continues",
                    self._name,
                    type(error).__name__,
                )
            except BaseException:
                log.exception("%s: the event loop failed", self._name)
                break
        os._exit(1)

    def _reach(self, _: Call, asked: ModelCall | ModelTask) -> Any:
        """Call another model outside of any request. On any thread. Raises `Unavailable` between plain calls."""
        current = self._current
        if current is None:
            raise Unavailable(
                f"model '{self._name}': a process can call other models only while it runs a request"
            )
        return current.model(asked, None)

    def serve(self, state: CallState) -> None:
        """Run a call until it has ended; start it, if it is of `async def` code."""
        message, state.message = state.message, None
        assert message is not None
        if (loop := self._loop) is None:
            self._current = state
            run_blocking(self._run(state, message))
        elif message.kind is Kind.START:
            run = partial(run_blocking, self._run(state, message))
            threading.Thread(target=run, name="start", daemon=True).start()
        else:
            tasks: list[asyncio.Task[None]] = []
            state.on_stop = partial(loop.call_soon_threadsafe, _cancel, tasks)
            loop.call_soon_threadsafe(self._begin, loop, state, self._run(state, message), tasks)

    def _begin(
        self, loop: asyncio.AbstractEventLoop, state: CallState, work: Any, tasks: list[asyncio.Task[None]]
    ) -> None:
        try:
            task = loop.create_task(work)
        except BaseException as error:  # Raised by the model's own task factory.
            work.close()
            self._fail(state, Kind.CALL, error)
        else:
            tasks.append(task)
            task.add_done_callback(partial(self._task_ended, state))

    def _task_ended(self, state: CallState, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # Before its first step.
            self._fail(state, Kind.CALL, _cancelled())

    async def _run(self, state: CallState, message: Message) -> None:
        """Run the model's code, and send the outcome."""
        kind, session = message.kind, self._session
        try:
            ready = await self._outcome(state, message)
            del message
            placed = None if ready is None else session.channel.place_all(ready[0])
            text = b"" if ready is None else ready[1]
            del ready  # It may refer to the inputs, whose regions can then be reused for the next call.
        except BaseException as error:  # A model that calls exit() fails this call, and keeps running.
            stopped = state.stopped and isinstance(error, asyncio.CancelledError)
            self._fail(state, kind, _cancelled() if stopped else error)
            return
        self._ended(state)
        try:
            session.send(Kind.DONE, state.number, text, placed)
        except FrameError as error:
            failure = Internal(f"model '{self._name}' returned outputs that cannot be sent to the server: {error}")
            session.send(Kind.FAILED, state.number, dumps(error_fields(failure)))

    def _ended(self, state: CallState) -> None:
        if self._loop is None:
            self._current = None
        state.end()

    def _fail(self, state: CallState, kind: Kind, error: BaseException) -> None:
        """Send the error of a call that a frame of `kind` began."""
        if kind is Kind.START:
            kind, fields = Kind.UNLOADABLE, load_failure_fields(error, self._file)
        else:
            kind, fields = Kind.FAILED, failure_fields(error)
        self._ended(state)
        self._session.send(kind, state.number, dumps(fields))

    async def _outcome(self, state: CallState, message: Message) -> Ready | None:
        fields = message.fields or {}
        call = self._call(state, fields)
        with RunningFor(call.members):
            if message.kind is Kind.START:
                self._start(call)
                return None
            if state.is_cancelled(state.number):  # It may have been queued here behind the previous call.
                raise reason_to_skip(call) or Cancelled("the request was cancelled while it waited for the model")
            if "counts" in fields:
                return await self._list(message, fields["counts"], call.members)
            result = self._function(_inputs(message), call)
            if isinstance(result, Generator) and self._loop is None:
                with closing(result) as yielded:
                    for answer in yielded:
                        if not state.respond(answer):
                            break
                return None
            if isinstance(result, AsyncGenerator) and self._loop is not None:
                async with aclosing(result) as answers:
                    async for answer in answers:
                        await state.send(answer)
                return None
            answer = result if self._loop is None else await result
            if answer is None:
                return None
            return rows_of(answer, self._name), text_of(non_tensor_fields(answer), self._name)

    async def _list(self, message: Message, counts: list[int], calls: Any) -> Ready:
        assert self._infer_batch is not None
        answers = self._infer_batch(_inputs_list(message, counts), calls)
        if self._loop is not None and inspect.isawaitable(answers):
            answers = await answers
        rows, others = list_rows(check_answers(answers, len(calls)), self._name)
        return rows, text_of({"answers": others}, self._name)

    def _call(self, state: CallState, fields: Mapping[str, Any]) -> Call:
        """Returns the call for the model's code; a shared, empty one if neither the code nor the log needs it."""
        return self._no_call if self._no_call is not None and not fields else RemoteCall(state, fields)


def _cancelled() -> Cancelled:
    return Cancelled("the call was cancelled while the model ran")


def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


def _inputs(message: Message) -> dict[str, Array]:
    """Returns the tensors of a call; from here on only the model refers to them."""
    tensors = message.tensors or {}
    if message.named is not None:
        message.named.clear()
    return tensors


def _inputs_list(message: Message, counts: list[int]) -> list[dict[str, Array]]:
    """As `_inputs`, for each of several requests."""
    tensors = list(grouped(message.named or (), counts))
    if message.named is not None:
        message.named.clear()
    return tensors
