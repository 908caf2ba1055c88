"""Workers, which run the calls that the server sends. In the model's process."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, Internal, Unavailable
from triglot.core.tensor import Array
from triglot.executors.batch import check_answers
from triglot.executors.process.answers import aside, grouped, list_rows, rows_of, text_of
from triglot.executors.process.arena import Row
from triglot.executors.process.channel import Message
from triglot.executors.process.failures import error_fields, failure_fields, load_failure_fields
from triglot.executors.process.frames import FrameError, Kind
from triglot.executors.process.remote_call import RemoteCall
from triglot.executors.process.session import CallState, Session
from triglot.executors.process.values import dumps
from triglot.executors.work import function_of, reason_to_skip, takes_call
from triglot.model.model import Model

log = logging.getLogger(__name__)

Ready = tuple[list[Row], bytes]
"""A response ready to be sent: its tensors, and the JSON besides them."""


class Worker(ABC):
    """Runs the calls of one model; `file` is the model's. `serve` is called on the main thread."""

    def __init__(self, session: Session, model: Model, file: Path) -> None:
        self._session = session
        self._name = session.name
        self._file = file
        self._infer = model.infer
        self._function = function_of(model)
        self._infer_batch = model.infer_batch
        self._start = model.start_instance
        self._no_call = None if takes_call(model.infer) else Call()

    @abstractmethod
    def serve(self, message: Message) -> None:
        """Run, or start to run, the call of a message."""

    def _finish(self, call: CallState, kind: Kind, outcome: Callable[[], Ready | None]) -> None:
        """Send the result of `outcome`, or the error that it raises, for a call that a frame of `kind` began."""
        session = self._session
        placed, text = None, b""
        try:
            if (ready := outcome()) is not None:
                placed, text = session.channel.place_all(ready[0]), ready[1]
            del ready  # It may refer to the inputs, whose regions can then be reused for the next call.
        except BaseException as error:  # A model that calls exit() fails this call, and keeps running.
            if kind is Kind.START:
                kind, text = Kind.UNLOADABLE, dumps(load_failure_fields(error, self._file))
            else:
                kind, text = Kind.FAILED, dumps(failure_fields(error))
        else:
            kind = Kind.DONE
        session.end(call)
        try:
            session.send(kind, call.number, text, placed)
        except FrameError as error:
            failure = Internal(f"model '{self._name}' returned outputs that cannot be sent to the server: {error}")
            session.send(Kind.FAILED, call.number, dumps(error_fields(failure)))

    def _started(self, message: Message, call: CallState) -> Ready | None:
        remote = RemoteCall(call, message.fields)
        with RunningFor((remote,)):
            self._start(remote)
        return None

    def _call(self, state: CallState, fields: Mapping[str, Any]) -> Call:
        """Returns the call for the model's code; a shared, empty one if neither the code nor the log needs it."""
        return self._no_call if self._no_call is not None and not fields else RemoteCall(state, fields)

    def _ready(self, answer: object) -> Ready | None:
        return None if answer is None else (rows_of(answer, self._name), text_of(aside(answer), self._name))

    def _ready_list(self, answers: Any, count: int) -> Ready:
        rows, beside = list_rows(check_answers(answers, count), self._name)
        return rows, text_of({"answers": beside}, self._name)


class SerialWorker(Worker):
    """Runs a model with plain (not `async def`) code: one call after the other, on the main thread."""

    def __init__(self, session: Session, model: Model, file: Path) -> None:
        super().__init__(session, model, file)
        self._current: CallState | None = None
        session.serial = True
        session.own = self._reach

    def _reach(self, _: Call, asked: ModelCall | ModelTask) -> Any:
        """Call another model outside of any request. On any thread. Raises `Unavailable` between calls."""
        current = self._current
        if current is None:
            raise Unavailable(
                f"model '{self._name}': a process can call other models only while it runs a request"
            )
        return current.model(asked, None)

    def serve(self, message: Message) -> None:
        """Run the call until it has ended."""
        self._session.wait_confirmed()
        call = self._current = self._session.begin(message.call)
        self._finish(call, message.kind, partial(self._outcome, message, call))

    def _outcome(self, message: Message, call: CallState) -> Ready | None:
        try:
            if message.kind is Kind.START:
                return self._started(message, call)
            fields = message.fields or {}
            remote = self._call(call, fields)
            if call.is_cancelled(call.number):  # It may have been queued here behind the previous call.
                raise reason_to_skip(remote) or Cancelled(
                    "the request was cancelled while it waited for the model"
                )
            with RunningFor(remote.members):
                if "counts" in fields:
                    assert self._infer_batch is not None
                    answers = self._infer_batch(_inputs_list(message, fields), remote.members)
                    return self._ready_list(answers, len(remote.members))
                result = self._function(_inputs(message), remote)
                if not isinstance(result, Generator):
                    return self._ready(result)
                with closing(result) as yielded:
                    for answer in yielded:
                        if not call.respond(answer):
                            break
                return None
        finally:
            self._current = None


class AsyncWorker(Worker):
    """Runs a model with `async def` code: any number of calls at the same time.

    They run on an event loop on a thread of its own, which keeps running between calls, as the server's would.
    """

    def __init__(self, session: Session, model: Model, file: Path) -> None:
        super().__init__(session, model, file)
        own = CallState(session, 0)
        session.own = lambda _, asked: own.model(asked, None)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="loop", daemon=True).start()

    def _run_loop(self) -> None:
        """Run the loop until the process ends: without it, calls would wait forever."""
        while not self._loop.is_closed():
            try:
                self._loop.run_forever()  # Returns if the model's code calls exit(), or stops the loop.
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

    def serve(self, message: Message) -> None:
        """Start the call on the event loop; `start_instance` runs on a thread of its own."""
        if message.kind is Kind.START:
            call = self._session.begin(message.call)
            outcome = partial(self._started, message, call)
            run = partial(self._finish, call, message.kind, outcome)
            threading.Thread(target=run, name="start", daemon=True).start()
            return
        tasks: list[asyncio.Task[Ready | None]] = []
        stop = partial(self._loop.call_soon_threadsafe, _cancel, tasks)
        call = self._session.begin(message.call, stop)
        self._loop.call_soon_threadsafe(self._begin, call, self._outcome(message, call), tasks)

    def _begin(self, call: CallState, work: Any, tasks: list[asyncio.Task[Ready | None]]) -> None:
        try:
            task = self._loop.create_task(work)
        except BaseException as error:  # Raised by the model's own task factory.
            work.close()
            self._finish(call, Kind.CALL, partial(_raise, error))
        else:
            tasks.append(task)
            task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: CallState, task: asyncio.Task[Ready | None]) -> None:
        if task.cancelled() and call.stopped:
            self._finish(call, Kind.CALL, partial(_raise, Cancelled("the call was cancelled while the model ran")))
        else:
            self._finish(call, Kind.CALL, task.result)

    async def _outcome(self, message: Message, call: CallState) -> Ready | None:
        fields = message.fields or {}
        remote = self._call(call, fields)
        with RunningFor(remote.members):
            if "counts" in fields:
                assert self._infer_batch is not None
                answers = self._infer_batch(_inputs_list(message, fields), remote.members)
                answers = await answers if inspect.isawaitable(answers) else answers
                return self._ready_list(answers, len(remote.members))
            result = self._function(_inputs(message), remote)
            if not inspect.isasyncgenfunction(self._infer):
                return self._ready(await result)
            async with aclosing(result) as yielded:
                async for answer in yielded:
                    await call.send(answer)
            return None


def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


def _raise(error: BaseException) -> Any:
    raise error


def _inputs(message: Message) -> dict[str, Array]:
    """Returns the tensors of a call; from here on only the model refers to them."""
    tensors = message.tensors or {}
    if message.named is not None:
        message.named.clear()
    return tensors


def _inputs_list(message: Message, fields: Mapping[str, Any]) -> list[dict[str, Array]]:
    """As `_inputs`, for each of several requests."""
    tensors = list(grouped(message.named or (), fields["counts"]))
    if message.named is not None:
        message.named.clear()
    return tensors
