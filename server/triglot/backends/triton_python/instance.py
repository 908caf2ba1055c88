"""An instance of a Triton Python model: an object of the model's class, and the threads that its code runs on."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from triglot.backends import described
from triglot.backends.triton_python.context import ModelContext, working_for
from triglot.core.call import BatchCall, Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Internal, ModelLoadError, text_of

log = logging.getLogger(__name__)


class InstanceLoop:
    """Runs on a daemon thread until `stop`, even if the code on it stops the loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._has_ended = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine and return its future, which is cancelled at the end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the loop and cancel its coroutines."""
        self._has_ended = True
        with suppress(RuntimeError):  # The model's code closed the loop.
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            while not self._has_ended:
                self._run_until_stopped()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()

    def _run_until_stopped(self) -> None:
        """Run the loop until something stops it."""
        what = "stopped its event loop"
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # A task of the model's own may have called exit().
            what = f"raised {type(error).__name__} in its event loop"
        if not self._has_ended:
            log.error("%s: the model's code %s; the loop continues", self._name, what)


class Instance:
    """Calls the model's code: `initialize` and `execute` on one thread, and finally `finalize`.

    `file` is the model's, `arguments` are those of `initialize`.
    """

    def __init__(
        self, model_class: type[Any], file: Path, arguments: Mapping[str, str], context: ModelContext
    ) -> None:
        self.name = arguments["model_instance_name"]
        self._class = model_class
        self._file = file
        self._arguments = arguments
        self._context = context
        self._model: Any = None
        self._loop: InstanceLoop | None = None
        self._own_loop: asyncio.AbstractEventLoop | None = None

    @property
    def device(self) -> tuple[str, str]:
        """The kind and number of the device."""
        return self._arguments["model_instance_kind"], self._arguments["model_instance_device_id"]

    def rename(self, taken: Collection[str]) -> None:
        """Take a name that is not `taken`, before `initialize`."""
        stem, _, _ = self.name.rpartition("_")
        self.name = next(name for at in itertools.count() if (name := f"{stem}_{at}") not in taken)
        self._arguments = {**self._arguments, "model_instance_name": self.name}

    @property
    def initialized(self) -> bool:
        """Whether `initialize` has returned."""
        return self._model is not None

    def initialize(self) -> None:
        """Call `initialize`, on the thread that will call `execute`. Raise `ModelLoadError` if that fails."""
        # In Triton this code runs on a main thread, which has an event loop; other threads have none.
        self._own_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._own_loop)
        try:
            with working_for(self._context, self._context.calls):
                model = self._class()
                if hasattr(model, "initialize"):
                    served = {"model_name": self._context.name, "model_version": str(self._context.version)}
                    model.initialize({**self._arguments, **served})
        except BaseException as error:  # Includes SystemExit.
            self._close_loops()
            raise ModelLoadError(f"{described(self._file, error)}") from error
        self._model = model

    def execute(self, requests: Sequence[Any], calls: Sequence[Call]) -> Any:
        """Return the result of `execute`, or a future for that of an `async def`. Raise its exceptions."""
        with working_for(self._context, calls[0] if len(calls) == 1 else BatchCall(calls)), RunningFor(calls):
            result = self._model.execute(list(requests))
            return self._start_coroutine(result, calls) if inspect.iscoroutine(result) else result

    @property
    def has_check(self) -> bool:
        """Whether the class has an `is_ready`."""
        return hasattr(self._class, "is_ready")

    def is_ready(self) -> bool:
        """Return the result of the model's `is_ready`, plain or async. Blocks; callable on any thread.

        Raise its exceptions, and `TypeError` for anything but a bool.
        """
        model = self._model
        if model is None:
            return False
        with working_for(self._context, self._context.calls):
            ready = model.is_ready()
            if inspect.iscoroutine(ready):
                ready = self._start_coroutine(ready).result()
        if not isinstance(ready, bool):
            raise TypeError(f"is_ready: expected it to return a bool, got {type(ready).__name__}")
        return ready

    def _start_coroutine(self, work: Coroutine[Any, Any, Any], calls: Sequence[Call] = ()) -> Future[Any]:
        """Start the coroutine on the loop that all coroutines of the instance share."""
        if self._loop is None:
            self._loop = InstanceLoop(f"{self.name} loop")
        return self._loop.start(self._run_guarded(work, calls))

    async def _run_guarded(self, work: Coroutine[Any, Any, Any], calls: Sequence[Call]) -> Any:
        with RunningFor(calls):
            try:
                return await work
            except (SystemExit, KeyboardInterrupt) as error:  # These would end the loop.
                raise self.failure(error) from None

    def failure(self, error: BaseException) -> Internal:
        """Return the error for clients, with the exception's text as in Triton, and log the traceback."""
        text = f"Failed to process the request(s) for model instance '{self.name}', message: "
        log.error("%s%s", text, type(error).__name__, exc_info=error)
        return Internal(f"{text}{type(error).__name__}: {text_of(error)}")

    def finalize(self) -> None:
        """Call `finalize`, once, when the instance runs nothing."""
        model, self._model = self._model, None
        try:
            if model is not None and hasattr(model, "finalize"):
                with working_for(self._context, self._context.calls):
                    model.finalize()
        except BaseException:  # The other instances must be finalized, too.
            log.exception("%s: finalize() failed", self.name)
        finally:
            self._close_loops()

    def _close_loops(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
        own, self._own_loop = self._own_loop, None
        if own is not None:
            with suppress(RuntimeError):  # The model started the loop, and it is running.
                own.close()
