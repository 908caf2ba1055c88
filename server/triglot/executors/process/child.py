"""The process of an instance: loads the model, and runs the calls that the server sends."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from triglot.executors.process.channel import Channel
from triglot.executors.process.failures import load_failure_fields
from triglot.executors.process.frames import Kind
from triglot.executors.process.health import BEAT_SECONDS
from triglot.executors.process.instance_config import InstanceConfig
from triglot.executors.process.logs import ProcessLog
from triglot.executors.process.session import CallState, Session, end_at_once
from triglot.executors.process.values import dumps
from triglot.executors.process.workers import Worker
from triglot.executors.work import takes_call
from triglot.model.model import Model, is_async, is_decoupled
from triglot.model.scheduling_rules import check_cpus, check_seconds
from triglot.platform.cpus import thread_limit, usable_cpus

log = logging.getLogger(__name__)

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main() -> None:
    """Entry point of the process, with the arguments SOCKET PARENT NAME.

    SOCKET is a file descriptor, PARENT the server's pid, and NAME shows the model in process listings.
    """
    end, parent = map(int, sys.argv[1:3])
    del sys.argv[1:]  # The model's code may parse the arguments, as unittest does.
    # Ctrl-C in a terminal is for the server, which lets running calls end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # It goes to the server's log.
    child = Child(Session(Channel(socket.socket(fileno=end))))
    threading.Thread(target=child.beat, args=(parent,), name="heart", daemon=True).start()
    child.run()


def _die_with(parent: int) -> None:
    """Have the system kill this process when the server's thread that started it ends, where the system can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        end_at_once()


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
        session = self._session
        loaded = self._load(session.next())
        if loaded is None:
            return
        model, file = loaded
        session.check_ready = model.check_ready
        worker = Worker(session, model, file)
        # Not for `async def` code: the thread of its event loop needs the interpreter's lock meanwhile.
        session.channel.wakeful = session.serial and _runs_beside_server()
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
            self._session.send(Kind.UNLOADABLE, state.number, dumps(load_failure_fields(error, file)))
            return None
        if model.own_metrics is not None:
            model.own_metrics.report_to(self._report)
        self._session.send(Kind.LOADED, state.number, declared)
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


def _declared(model: Model, config: InstanceConfig) -> dict[str, Any]:
    """Returns the model's attributes, and what else the server needs to know of it.

    Raises `ValueError` for a model that takes whole messages, `TypeError` for an attribute that cannot be sent,
    and as `takes_call`.
    """
    if model.takes_messages:
        raise ValueError("execution: expected 'thread' for a model that takes whole messages, got 'process'")
    declared: dict[str, Any] = {}
    for name in Model.__annotations__:
        if name not in ("infer", "infer_batch", "check_ready", "model_config", "own_metrics", "own_batches"):
            try:
                dumps(declared.setdefault(name, getattr(model, name)))
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
    if model.places_instances:
        declared["instances"] = config.count
    infer = model.infer
    return {
        "class": type(model).__name__,
        "takes_call": takes_call(infer),
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
    """Pin the process to one of the CPUs; none: to no CPU. Raises `ValueError` for one that it may not use."""
    if not cpus:
        return
    wanted = cpus[instance % len(cpus)]
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"cpus: expected none, as this system cannot bind processes to CPUs; got {list(cpus)}")
    there = sorted(usable_cpus())
    if wanted not in there:
        raise ValueError(f"cpus: expected CPUs that this server may use, {there}, got {wanted}")
    # All threads, also those that libraries have started when they were imported.
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), [wanted])


def _runs_beside_server() -> bool:
    """Returns whether this process and its parent can run on different CPUs at the same time."""
    return len(usable_cpus() | usable_cpus(os.getppid())) > 1 and thread_limit() != 1
