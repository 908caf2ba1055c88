"""Models that call other models of this server: what `Call.infer` and `Call.infer_stream` do (spec 5.3).

Strategy: a model's call goes the way of a client's, from the lease to the statistics, on the loop and in a task of
its own. Code on the loop gets the task; a thread is held up until it has ended. Each call knows by its `_Link` on
whose behalf it runs, back to the client's: so calls that go round in circles are seen.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from triglot.core.call import MAX_MODEL_CALLS, Call, ModelCall, ModelTask, Reach
from triglot.core.errors import (
    RETRY_AFTER_SECONDS,
    Cancelled,
    Code,
    FailedPrecondition,
    NotFound,
    QueueFull,
    ServingError,
    Unavailable,
    outcome,
)
from triglot.core.permission import EVERYTHING
from triglot.core.tensor import Array
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.model_tensors import arrays_of, request_of
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Endpoint, Observation
from triglot.telemetry.store import Telemetry

T = TypeVar("T")

STOPPED = "the server has stopped"


class _Link:
    """One call of a model's: whose code makes it, `caller` being the model and the version, and on whose behalf.

    `waits`: for another instance of the same model.
    Called with a call that was made by it, and what that asks for, it is what this call's `reach` has to be.
    """

    __slots__ = ("before", "caller", "calls", "depth", "waits")

    def __init__(self, calls: ModelCalls, caller: tuple[str, int], before: _Link | None) -> None:
        self.calls = calls
        self.caller = caller
        self.before = before
        self.waits = False
        self.depth: int = 1 if before is None else before.depth + 1

    def __call__(self, call: Call, wanted: ModelCall | ModelTask) -> Any:
        return self.calls.run(call, wanted, self)

    @property
    def apart(self) -> Reach:
        """What `reach` is where the model calls on behalf of no request."""
        return self.calls.reach

    def chain(self) -> list[_Link]:
        """All that it is made on behalf of, itself first."""
        links, link = [], self.before
        links.append(self)
        while link is not None:
            links.append(link)
            link = link.before
        return links

    def path(self, last: str) -> str:
        """The models, as messages show them."""
        # A warm-up has no name.
        return " -> ".join([*(link.caller[0] for link in reversed(self.chain()) if link.caller[0]), last])


class ModelCalls:
    """Runs what models ask of others. Made on the loop; `telemetry` counts it, None counts nothing.

    It is counted with the called model, and not with what clients ask of the server.
    """

    def __init__(self, dataplane: DataPlane, telemetry: Telemetry | None) -> None:
        self._dataplane = dataplane
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._held: Counter[tuple[str, int]] = Counter()
        self._one = self._streamed = None
        if telemetry is not None:
            self._one = telemetry.endpoint("internal", "MODEL", "infer", inference=True, internal=True)
            self._streamed = telemetry.endpoint("internal", "MODEL", "infer_stream", inference=True, internal=True)

    def reach(self, call: Call, wanted: ModelCall | ModelTask) -> Any:
        """What `Call.infer` and `Call.infer_stream` give to the code that a client's call runs."""
        return self.run(call, wanted, None)

    def run(self, parent: Call, wanted: ModelCall | ModelTask, before: _Link | None) -> Any:
        """On the loop a task, or an async iterator; on other threads what becomes of it."""
        on_loop = threading.get_ident() == self._thread
        if isinstance(wanted, ModelTask):
            done = self._done(wanted)
            return self._loop.create_task(done) if on_loop else self._wait(done)
        link = _Link(self, (parent.model_name, parent.model_version), before)
        if wanted.stream:
            answers = self._stream(parent, wanted, link)
            return answers if on_loop else self._pull(parent, answers)
        if not on_loop:
            return self._wait(self._infer(parent, wanted, link))
        task = self._loop.create_task(self._infer(parent, wanted, link))
        task.add_done_callback(_look_at)
        return task

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Hold this thread up until the loop has done the work."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise Unavailable(STOPPED) from None
        try:
            return future.result()
        except CancelledError:
            raise Unavailable(STOPPED) from None
        finally:
            del future  # It has the error, whose traceback has this frame.

    def _pull(self, parent: Call, answers: AsyncGenerator[T, None]) -> Iterator[T]:
        """The answers, on a thread; closing the generator stops the model."""
        try:
            while True:
                try:
                    yield self._wait(_next(parent, answers))
                except StopAsyncIteration:
                    return
        finally:
            if threading.get_ident() == self._thread:  # Of the garbage collector.
                closing = self._loop.create_task(answers.aclose())
                closing.add_done_callback(_look_at)
            else:
                self._wait(_closed(answers))

    # --- on the loop ---

    async def _done(self, task: ModelTask) -> bool:
        """Whether the model is ready after it. Raises `ServingError` as a client would get it."""
        if task.action == "load":
            await self._dataplane.load_model(EVERYTHING, task.model, task.config)
        elif task.action == "unload":
            await self._dataplane.unload_model(EVERYTHING, task.model, dependents=task.dependents)
        try:
            return await self._dataplane.check_ready(EVERYTHING, task.model, task.version)
        except NotFound:
            return False

    async def _infer(self, parent: Call, wanted: ModelCall, link: _Link) -> dict[str, Array]:
        child = _child(parent, wanted, link)
        with _observed(self._one, child), _naming(wanted.model), _following(parent):
            request = await request_of(parent, wanted)
            servable = self._dataplane.servable_of(child.permission, request)
            with servable, self._holding(link, servable):
                return arrays_of(await self._dataplane.infer_on(servable, request, child))

    async def _stream(
        self, parent: Call, wanted: ModelCall, link: _Link
    ) -> AsyncGenerator[dict[str, Array], None]:
        child = _child(parent, wanted, link)
        with _observed(self._streamed, child), _naming(wanted.model):
            request = await request_of(parent, wanted)
            servable = self._dataplane.servable_of(child.permission, request)
            with servable, self._holding(link, servable):
                responses = await self._dataplane.infer_stream_on(servable, request, child)
                async with aclosing(responses):
                    async for response in responses:
                        yield arrays_of(response)

    @contextmanager
    def _holding(self, link: _Link, servable: Servable) -> Iterator[None]:
        """A call that needs an instance of a model, while others of its instances wait for it.

        Raises `FailedPrecondition` when these are all that there can be, and `QueueFull` when other calls hold the
        rest.
        """
        if link.depth > MAX_MODEL_CALLS:
            raise FailedPrecondition(
                f"model calls are nested more than {MAX_MODEL_CALLS} deep: {link.path(servable.name)}"
            )
        key, instances = (servable.name, servable.version), servable.model.instances
        own = [one for one in link.chain() if one.caller == key]
        if not own or (servable.direct and not servable.model.holds_instances):
            yield
            return
        if servable.sequences is not None:
            raise FailedPrecondition(f"the call could deadlock on its own sequence: {link.path(servable.name)}")
        new = [one for one in own if not one.waits]
        if self._held[key] + len(new) >= instances:
            text = (
                f"the call would deadlock: {link.path(servable.name)}, and every instance of '{servable.name}' "
                f"({instances}) waits for such a call; configure more instances"
            )
            raise (
                FailedPrecondition(text)
                if len(own) >= instances
                else QueueFull(text, retry_after=RETRY_AFTER_SECONDS)
            )
        self._held[key] += len(new)
        for one in new:
            one.waits = True
        try:
            yield
        finally:
            for one in new:
                one.waits = False
            self._held[key] -= len(new)
            if not self._held[key]:
                del self._held[key]


def _look_at(task: asyncio.Task[Any]) -> None:
    """Of a task that nobody awaited there is nothing to tell."""
    if not task.cancelled():
        task.exception()


async def _closed(answers: AsyncGenerator[Any, None]) -> None:
    await answers.aclose()


@contextmanager
def _following(parent: Call) -> Iterator[None]:
    """The current task, which does nothing else, is cancelled with the parent.

    Raises `Cancelled` or `DeadlineExceeded` then.
    """
    if parent.cancelled:
        raise _left(parent)
    running = asyncio.current_task()
    assert running is not None
    # It has the error in the end, whose traceback has this frame.
    task = weakref.ref(running)
    del running
    gone = False

    def end() -> None:
        nonlocal gone
        # A batch is cancelled when all of its members are.
        if parent.cancelled and not gone and (followed := task()) is not None:
            gone = True
            followed.cancel()

    parent.follow(end)
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        raise _left(parent) from None
    finally:
        parent.unfollow(end)


async def _next(parent: Call, answers: AsyncGenerator[T, None]) -> T:
    with _following(parent):
        return await anext(answers)


def _left(parent: Call) -> ServingError:
    when = "while it called another model"
    return parent.overdue(when) if parent.expired else Cancelled(f"the request was cancelled {when}")


def _child(parent: Call, wanted: ModelCall, link: _Link) -> Call:
    child = parent.child()
    child.reach = link
    child.permission = EVERYTHING  # A model's code calls whatever model it likes.
    child.model_name = wanted.model
    child.scheduling = parent.scheduling
    # Of several that are executed together, one may be traced.
    child.trace = next((one.trace for one in parent.members if one.trace is not None), None)
    return child


@contextmanager
def _observed(endpoint: Endpoint | None, child: Call) -> Iterator[None]:
    if endpoint is None:
        yield
        return
    observed = Observation(endpoint, child)
    code = Code.OK
    try:
        yield
    except BaseException as error:
        # Who has read enough of a stream closes it.
        code = Code.OK if isinstance(error, GeneratorExit) else outcome(error)
        raise
    finally:
        observed.end(code)


@contextmanager
def _naming(model: object) -> Iterator[None]:
    """Errors say which model was called."""
    try:
        yield
    except ServingError as error:
        if f"'{model}'" not in error.message and f"{model} version " not in error.message:
            error.message = f"model '{model}': {error.message}"
        raise
