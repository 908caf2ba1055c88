"""The process of an instance: loads the model, and runs what the server sends, one call after the other."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from triglot.core.errors import Cancelled, MissingDependency, ModelLoadError, ServingError
from triglot.core.model import Model
from triglot.engine.declarations import function_of, takes_call
from triglot.engine.processes.channel import Channel, Gone, Message
from triglot.engine.processes.conversation import Conversation, RemoteCall, error_fields
from triglot.engine.processes.frames import Kind
from triglot.engine.processes.health import BEAT_SECONDS
from triglot.engine.processes.instance_config import InstanceConfig
from triglot.engine.processes.page import Page
from triglot.engine.processes.values import dumps, loads
from triglot.engine.work import Function, Inputs

_DIE_WITH_PARENT = 1
MAX_TRACE = 64 * 1024
"""Characters of a trace that reach the server's log."""


def main() -> None:
    """`python -c … SOCKET PAGE PARENT NAME`: what `Process.start` runs."""
    end, page, parent = map(int, sys.argv[1:4])
    # A terminal's Ctrl-C is for the server: it lets the calls end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # It is the server's log.
    channel = Channel(socket.socket(fileno=end))
    worker = Worker(channel, Page(page))
    os.close(page)
    threading.Thread(target=worker.beat, args=(parent,), name="heart", daemon=True).start()
    try:
        worker.run()
    except Gone:
        _end_at_once()


def _die_with(parent: int) -> None:
    """Have the system end this process with the server's thread that has started it, where it can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        _end_at_once()


def _end_at_once() -> NoReturn:
    """There is nobody left to answer to, whatever the model still does."""
    os._exit(1)


class Worker:
    """Loads one model, and runs it."""

    def __init__(self, channel: Channel, page: Page) -> None:
        self._channel = channel
        self._page = page
        self._name = ""
        self._infer: Callable[..., Any]
        self._function: Function
        self._with_call = False
        self._task: asyncio.Task[Any] | None = None
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- the heart ---

    def beat(self, parent: int) -> None:
        """On a thread of its own: as long as the server is there."""
        poll = select.poll()
        poll.register(self._channel.socket, 0)  # Only whether the other side is gone.
        while not poll.poll(1000 * BEAT_SECONDS) and os.getppid() == parent:
            self._page.beat()
            self._cancel_if_told()
            self._channel.arena.trim(time.monotonic())
        _end_at_once()

    # --- the model ---

    def run(self) -> None:
        """Until the server says that this is the end. Raises `Gone`."""
        model = self._load(self._channel.receive())
        if model is None:
            return
        self._infer, self._function = model.infer, function_of(model)
        self._with_call = takes_call(model.infer)
        while (message := self._channel.receive()).kind is not Kind.END:
            if message.kind is not Kind.CALL:
                raise Gone(f"expected a call, got {message.kind.name}")
            self._number = message.call
            self._serve(message)
            del message
        self._close(model)

    def _load(self, message: Message) -> Model | None:
        setup = loads(message.text)
        self._name = setup["name"]
        _log_as(setup["log"])
        file: Path = setup["file"]
        try:
            _run_on(setup["cpus"], setup["instance"])
            config = InstanceConfig.of(setup["config"], setup["instance"])
            model = _load_function(setup["load"])(setup["backend"], file, config)
            if not setup["cpus"]:
                _run_on(model.cpus, setup["instance"])
            declared = dumps(_declared(model, config))
        except BaseException as error:
            text = str(error) if isinstance(error, ModelLoadError) else f"{file}: {type(error).__name__}: {error}"
            fields = {"message": text, "missing": isinstance(error, MissingDependency)}
            if isinstance(error, ModelLoadError):
                fields["code"] = int(error.code)
            if (cause := _own_error(error, file.parent)) is not None:
                fields |= _failure(cause)
            self._channel.send(Kind.UNLOADABLE, text=dumps(fields))
            return None
        self._channel.send(Kind.LOADED, text=declared)
        return model

    def _close(self, model: Model) -> None:
        try:
            model.close()
        except Exception:
            logging.getLogger(__name__).exception("%s failed to close", self._name)

    # --- a call ---

    def _serve(self, message: Message) -> None:
        """Run one call to its end, and send what came of it."""
        self._number = message.call
        conversation = Conversation(self._channel, self._page, message.call, self._name)
        inputs, text, placed, kind = message.tensors or {}, b"", None, Kind.DONE
        try:
            call = RemoteCall(conversation, message.fields or {} if self._with_call else {})
            answer = self._result(dict(inputs), call, conversation)
            if answer is not None:
                placed = conversation.placed(answer)
                del answer
        except Gone:
            raise
        except BaseException as error:  # A model that calls exit() fails this call, and goes on.
            kind, text = Kind.FAILED, dumps(_failure(error))
        conversation.end()
        inputs.clear()  # So that their region can be used for the next call.
        self._channel.send(kind, call=message.call, text=text, placed=placed)

    def _result(self, inputs: Inputs, call: RemoteCall, conversation: Conversation) -> Any:
        """What `infer` gives as its last answer; the others have been sent."""
        if inspect.iscoroutinefunction(self._infer):
            return self._on_loop(self._function(inputs, call))
        if inspect.isasyncgenfunction(self._infer):
            return self._on_loop(_send_each(self._function(inputs, call), conversation))
        result = self._function(inputs, call)
        if isinstance(result, Generator):
            del inputs
            with closing(result) as answers:
                for answer in answers:
                    if not conversation.answer(answer):
                        break
            return None
        return result

    def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """`async def` code has a loop that runs on between the calls, as it has in the server."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="loop", daemon=True).start()
        loop, done = self._loop, Future[Any]()

        def begin() -> None:
            task = self._task = loop.create_task(work)
            task.add_done_callback(partial(_hand_over, done))

        loop.call_soon_threadsafe(begin)
        try:
            return done.result()
        finally:
            self._task = None

    def _cancel_if_told(self) -> None:
        """On the heart's thread: `async def` code is cancelled with its call, as in the server."""
        task, loop = self._task, self._loop
        if task is not None and loop is not None and self._page.cancelled == self._number:
            self._task = None  # Once.
            loop.call_soon_threadsafe(task.cancel)


def _hand_over(done: Future[Any], task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        done.set_exception(Cancelled("the call was cancelled while the model ran"))
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


async def _send_each(answers: AsyncGenerator[Any, None], conversation: Conversation) -> None:
    loop = asyncio.get_running_loop()
    async with aclosing(answers):
        async for answer in answers:
            # It may have to wait for the reader.
            if not await loop.run_in_executor(None, conversation.answer, answer):
                break


# --- what is handed over ---


def _failure(error: BaseException) -> dict[str, Any]:
    """An exception: one of ours as it is, of any other what the server's log is to say."""
    if isinstance(error, ServingError):
        return error_fields(error)
    trace = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "text": str(error)[:MAX_TRACE], "trace": trace[-MAX_TRACE:]}


def _own_error(error: BaseException, folder: Path) -> BaseException | None:
    """What the model's own code has raised, and did not word for us: its trace from there on."""
    cause: BaseException | None = error
    while isinstance(cause, ModelLoadError | ServingError):
        cause = cause.__cause__
    trace = None if cause is None else cause.__traceback__
    while trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(folder):
        trace = trace.tb_next
    return None if cause is None or trace is None else cause.with_traceback(trace)


def _load_function(path: str) -> Callable[[str, Path, InstanceConfig], Model]:
    module, _, name = path.partition(":")
    function: Callable[[str, Path, InstanceConfig], Model] = getattr(importlib.import_module(module), name)
    return function


def _declared(model: Model, config: InstanceConfig) -> dict[str, Any]:
    """What the server has to know of the model. Raises as `takes_call`, and for what cannot be handed over."""
    if model.takes_messages:
        raise ValueError("execution: expected 'thread' for a model that takes whole messages, got 'process'")
    if model.infer_batch is not None:
        raise ValueError("execution: expected 'thread' for a model with an infer_batch, got 'process'")
    declared: dict[str, Any] = {}
    for name in Model.__annotations__:
        if name not in ("infer", "infer_batch", "model_config"):
            try:
                dumps(declared.setdefault(name, getattr(model, name)))
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
    if model.places_instances:
        declared["instances"] = config.count
    infer = model.infer
    streams = inspect.isgeneratorfunction(infer) or inspect.isasyncgenfunction(infer)
    kind = {"class": type(model).__name__, "streams": streams, "takes_call": takes_call(infer)}
    return {**kind, "attributes": declared}


# --- where it runs ---


def _run_on(cpus: Any, instance: int) -> None:
    """Raises `ValueError` for a CPU that is not there."""
    if not cpus:
        return
    wanted = cpus[instance % len(cpus)]
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"cpus: expected none, this system cannot bind processes to CPUs; got {list(cpus)}")
    there = sorted(os.sched_getaffinity(0))
    if wanted not in there:
        raise ValueError(f"cpus: expected some of {there}, which this server may use, got {wanted}")
    # Threads that libraries have started at their import, too.
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), [wanted])


def _log_as(settings: Mapping[str, Any]) -> None:
    """As the server does, to the same place."""
    if settings:
        logging.basicConfig(level=settings["level"], format=settings["format"], datefmt=settings["dates"])
