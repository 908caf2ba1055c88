"""The process of an instance: loads the model, and runs the calls that the server sends."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import select
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from triglot.core.call import Call, ModelCall, ModelTask
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, Internal, Unavailable, error_fields
from triglot.executors.batch import check_answers
from triglot.executors.remote.channel import BEAT_SECONDS, Message, run_blocking
from triglot.executors.remote.failures import failure_fields, load_failure_fields
from triglot.executors.remote.fields import grouped, list_rows, non_tensor_fields, rows_of, text_of
from triglot.executors.remote.frames import FrameError, Kind
from triglot.executors.remote.logs import ProcessLog
from triglot.executors.remote.session import CallState, RemoteCall, Session, end_at_once
from triglot.executors.remote.shared_memory import Named, Row
from triglot.executors.remote.values import dumps
from triglot.executors.work import function_of, reason_to_skip, takes_call
from triglot.model.config import Device, ModelConfig
from triglot.model.model import Model, is_async, is_decoupled
from triglot.model.scheduling_rules import check_cpus, check_seconds
from triglot.platform.cpus import thread_limit, usable_cpus

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
        self._no_call = None if takes_call(model) else Call()
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
        """Call another model outside of any request. On any thread. Raise `Unavailable` between plain calls."""
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
        self._on_end(state)
        try:
            session.send(Kind.DONE, state.number, text, placed)
        except FrameError as error:
            failure = Internal(f"model '{self._name}' returned outputs that cannot be sent to the server: {error}")
            session.send(Kind.FAILED, state.number, dumps(error_fields(failure)))

    def _on_end(self, state: CallState) -> None:
        if self._loop is None:
            self._current = None
        state.end()

    def _fail(self, state: CallState, kind: Kind, error: BaseException) -> None:
        """Send the error of a call that a frame of `kind` began."""
        fields = load_failure_fields(error, self._file) if kind is Kind.START else failure_fields(error)
        self._on_end(state)
        self._session.send(Kind.FAILED, state.number, dumps(fields))

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
            result = self._function(dict(_taken(message)), call)
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
        answers = self._infer_batch([*grouped(_taken(message), counts)], calls)
        if self._loop is not None and inspect.isawaitable(answers):
            answers = await answers
        rows, others = list_rows(check_answers(answers, len(calls)), self._name)
        return rows, text_of({"answers": others}, self._name)

    def _call(self, state: CallState, fields: Mapping[str, Any]) -> Call:
        """Return the call for the model's code; a shared, empty one if neither the code nor the log needs it."""
        return self._no_call if self._no_call is not None and not fields else RemoteCall(state, fields)


def _cancelled() -> Cancelled:
    return Cancelled("the call was cancelled while the model ran")


def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


def _taken(message: Message) -> Named:
    """Return the tensors of a call; from here on only the model refers to them."""
    named = [*(message.named or ())]
    if message.named is not None:
        message.named.clear()
    return named


@dataclass(frozen=True, slots=True)
class InstanceConfig(ModelConfig):
    """A model's configuration as the process of the instance with the number `instance` sees it.

    It has one of the configured devices, so that a backend that places its instances loads one copy of the model.
    """

    owns_process: ClassVar[bool] = True
    instance: int = 0
    _counts: list[int] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, config: ModelConfig, instance: int) -> InstanceConfig:
        """Return the configuration as this instance sees it: `execution` is "thread", in its own process."""
        named = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
        return cls(**{**named, "execution": "thread"}, instance=instance)

    @property
    def count(self) -> int:
        """Number of instances: of devices when the backend last called `devices`; 1 if there were none."""
        return (self._counts[-1] if self._counts else 0) or 1

    def devices(self, gpu_count: Callable[[], int]) -> list[Device]:
        """Return the device of this instance; none without instance groups. Raise as `ModelConfig.devices`."""
        devices = ModelConfig.devices(self, gpu_count)
        self._counts.append(len(devices))
        return devices[self.instance % len(devices) :][:1] if devices else []


class Child:
    """Loads one model, and runs it: `run` on the main thread, or on an actor's, and `beat` on another."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._log: ProcessLog | None = None

    def beat(self, parent: int) -> None:
        """Send heartbeats, and do periodic work, until the server is gone; then end the process.

        On a thread of its own. `parent` is the pid of the process that has started this one.
        """
        session, channel = self._session, self._session.channel
        poll = select.poll()
        poll.register(channel.socket, 0)  # Reports only that the server has closed it.
        try:
            while not poll.poll(1000 * BEAT_SECONDS) and os.getppid() == parent:
                if not channel.congested:
                    session.send(Kind.BEAT)
                try:
                    channel.poll()  # What the server has sent while the model runs.
                    channel.trim(time.monotonic())
                    if self._log is not None:
                        self._log.follow(session.log_switches)
                except Exception:  # The heartbeat must continue, or the server takes the process for hung.
                    log.exception("%s: the tasks between two calls failed", session.name)
        finally:
            end_at_once()

    # --- the model ---

    def run(self) -> None:
        """Load the model, and run calls until the server sends END; return if the model cannot be loaded."""
        try:
            self._run(self._session)
        finally:
            self._session.channel.flush()  # Another thread may be sending the last frame, and would not finish.

    def _run(self, session: Session) -> None:
        loaded = self._load(session.next())
        if loaded is None:
            return
        model, file = loaded
        session.check_ready = model.check_ready
        worker = Worker(session, model, file)
        # Not for `async def` code: the thread of its event loop needs the interpreter's lock meanwhile.
        channel = session.channel
        channel.wakeful = session.serial and channel.shares_memory and _has_core_of_its_own()
        while (state := session.next()).kind is not Kind.END:
            worker.serve(state)
            del state
        self._close(model)

    def _load(self, state: CallState) -> tuple[Model, Path] | None:
        assert state.message is not None
        setup = state.message.fields
        state.end()
        self._session.name = setup["name"]
        self._log = ProcessLog(setup["log"], f"{setup['name']}: {setup['kind']} {setup['instance']}")
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
            self._session.send(Kind.FAILED, state.number, dumps(load_failure_fields(error, file)))
            return None
        if model.own_metrics is not None:
            model.own_metrics.report_to(self._report)
        self._session.send(Kind.DONE, state.number, declared)
        return model, file

    def _report(self, change: Mapping[str, Any]) -> None:
        """Send a change of the model's metrics."""
        self._session.send(Kind.METRICS, text=dumps(change))

    def _close(self, model: Model) -> None:
        try:
            model.close()
        except BaseException:
            log.exception("%s failed to close", self._session.name)


# --- what is loaded, and declared to the server ---


def _load_function(path: str) -> Callable[[str, Path, InstanceConfig], Model]:
    module, _, name = path.partition(":")
    function: Callable[[str, Path, InstanceConfig], Model] = getattr(importlib.import_module(module), name)
    return function


_OWN: Final = (
    "infer",
    "infer_batch",
    "check_ready",
    "model_config",
    "own_metrics",
    "own_batches",
    "takes_arguments",
)
"""Attributes that concern the process alone."""


def _declared(model: Model, config: InstanceConfig) -> dict[str, Any]:
    """Return the model's attributes, and what else the server needs to know of it.

    Raise `ValueError` for a model that takes whole messages, `TypeError` for an attribute that cannot be sent,
    and as `takes_call`.
    """
    if model.takes_messages:
        raise ValueError("execution: expected 'thread' for a model that takes whole messages, got 'process'")
    declared: dict[str, Any] = {}
    for name in Model.__annotations__:
        if name not in _OWN:
            try:
                dumps(declared.setdefault(name, getattr(model, name)))
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
    if model.places_instances:
        declared["instances"] = config.count
    infer = model.infer
    return {
        "class": type(model).__name__,
        "takes_call": takes_call(model),
        "lists": model.infer_batch is not None,
        "checks_ready": model.check_ready is not None,
        "metrics": model.own_metrics is not None,
        "starts": type(model).start_instance is not Model.start_instance,
        "on_loop": is_async(infer),
        "streams": is_decoupled(infer),
        "attributes": declared,
    }


# --- where it runs ---


def _run_on(cpus: Any, instance: int) -> None:
    """Pin the process to one of the CPUs; none: to no CPU. Raise `ValueError` for one that it may not use."""
    if not cpus:
        return
    wanted = cpus[instance % len(cpus)]
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"cpus: expected none, as this system cannot bind processes to CPUs; got {list(cpus)}")
    available = sorted(usable_cpus())
    if wanted not in available:
        raise ValueError(f"cpus: expected CPUs that this server may use, {available}, got {wanted}")
    # All threads, also those that libraries have started when they were imported.
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), [wanted])


def _has_core_of_its_own() -> bool:
    """Return whether this process and its parent can run on different CPUs at the same time."""
    return len(usable_cpus() | usable_cpus(os.getppid())) > 1 and thread_limit() != 1
