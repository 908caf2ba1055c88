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
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from triglot.core.errors import Cancelled, Internal
from triglot.core.model import Model, is_decoupled
from triglot.core.model_scheduling import check_cpus, check_seconds
from triglot.engine.declarations import function_of, takes_call
from triglot.engine.processes.channel import Channel, Gone, Message
from triglot.engine.processes.conversation import Conversation, RemoteCall
from triglot.engine.processes.failures import error_fields, failure_fields, load_failure_fields
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.health import BEAT_SECONDS
from triglot.engine.processes.instance_config import InstanceConfig
from triglot.engine.processes.page import Page
from triglot.engine.processes.values import dumps, loads
from triglot.engine.work import Function, Inputs

log = logging.getLogger(__name__)

_DIE_WITH_PARENT = 1


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
        self._pid = os.getpid()
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
        try:
            while not poll.poll(1000 * BEAT_SECONDS) and os.getppid() == parent:
                self._page.beat()
                self._see_to()
        finally:
            _end_at_once()

    def _see_to(self) -> None:
        try:
            self._cancel_if_told()
            self._channel.arena.trim(time.monotonic())
        except Exception:  # As long as the heart beats nobody takes the process for hung.
            log.exception("%s: what is done between two calls failed", self._name)

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
                check_cpus("cpus", model.cpus)
                _run_on(model.cpus, setup["instance"])
            if config.hang_seconds is None:
                check_seconds("hang_seconds", model.hang_seconds)
            if config.longest_run is None:
                check_seconds("longest_run", model.longest_run)
            declared = dumps(_declared(model, config))
        except BaseException as error:
            self._channel.send(Kind.UNLOADABLE, text=dumps(load_failure_fields(error, file)))
            return None
        self._channel.send(Kind.LOADED, text=declared)
        return model

    def _close(self, model: Model) -> None:
        try:
            model.close()
        except BaseException:
            log.exception("%s failed to close", self._name)

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
            kind, text = Kind.FAILED, dumps(failure_fields(error))
        if os.getpid() != self._pid:
            _end_at_once()  # The model has forked; only one of the two has the connection.
        conversation.end()
        inputs.clear()  # So that their region can be used for the next call.
        try:
            self._channel.send(kind, call=message.call, text=text, placed=placed)
        except FrameError as error:
            told = Internal(f"model '{self._name}' returned outputs that cannot be handed over: {error}")
            self._channel.send(Kind.FAILED, call=message.call, text=dumps(error_fields(told)))

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
            threading.Thread(target=self._run_loop, args=(self._loop,), name="loop", daemon=True).start()
        loop, done = self._loop, Future[Any]()

        def begin() -> None:
            try:
                task = self._task = loop.create_task(work)
                task.add_done_callback(partial(self._hand_over, done))
            except BaseException as error:  # Of the model's own task factory.
                done.set_exception(error)

        loop.call_soon_threadsafe(begin)
        try:
            return done.result()
        finally:
            self._task = None

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """As long as the process lives: a call would wait for ever for a loop that has ended."""
        while not loop.is_closed():
            try:
                loop.run_forever()  # Until code calls exit(), or stops the loop.
            except (SystemExit, KeyboardInterrupt) as error:
                log.error("%s: its code has raised %s; its loop goes on", self._name, type(error).__name__)
            except BaseException:
                log.exception("%s: its loop has failed", self._name)
                break
        _end_at_once()

    def _hand_over(self, done: Future[Any], task: asyncio.Task[Any]) -> None:
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self._page.cancelled == self._number:
            error = Cancelled("the call was cancelled while the model ran")
        else:
            error = asyncio.CancelledError()  # Its own.
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def _cancel_if_told(self) -> None:
        """On the heart's thread: `async def` code is cancelled with its call, as in the server."""
        task, loop = self._task, self._loop
        if task is not None and loop is not None and self._page.cancelled == self._number:
            self._task = None  # Once.
            loop.call_soon_threadsafe(task.cancel)


async def _send_each(answers: AsyncGenerator[Any, None], conversation: Conversation) -> None:
    loop = asyncio.get_running_loop()
    async with aclosing(answers):
        async for answer in answers:
            # It may have to wait for the reader.
            if not await loop.run_in_executor(None, conversation.answer, answer):
                break


# --- what is handed over ---


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
    kind = {"class": type(model).__name__, "streams": is_decoupled(infer), "takes_call": takes_call(infer)}
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
