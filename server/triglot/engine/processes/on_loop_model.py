"""A model whose instances are processes and whose code is `async def`: each runs as many calls as come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from triglot.core.call import BatchCall, Call
from triglot.engine.processes.health import BEAT_SECONDS
from triglot.engine.processes.multiplexed import MultiplexedCalls
from triglot.engine.processes.owner import NotBegun
from triglot.engine.processes.process import Process
from triglot.engine.processes.remote_model import RemoteModel
from triglot.engine.work import Function, Inputs

T = TypeVar("T")


class OnLoopModel(RemoteModel):
    """One that gives one answer."""

    async def infer(self, inputs: Inputs, call: Call) -> Any:
        """What the model answers. Raises `Unavailable` when its process is lost, and what the model raises."""
        while True:
            # Of a process that was lost before, another one may run the call.
            with suppress(NotBegun):
                async with self._process(call) as process:
                    return await _at_once(process).run(inputs, call)

    @asynccontextmanager
    async def _process(self, call: Call) -> AsyncGenerator[Process, None]:
        """A process for this call, waiting for one. Raises as `Pool.borrowed`."""
        self.loop = asyncio.get_running_loop()
        since = time.perf_counter()
        waited = False
        while (process := self._pool.shared(call)) is None:
            waited = True
            # Nobody says when one comes.
            await asyncio.sleep(BEAT_SECONDS)
        for member in call.members if waited else ():
            member.waited(since)
        try:
            yield process
        finally:
            if process.lost:
                self._pool.lose(process)

    @property
    def given_up(self) -> int:
        """See `HostedModel`."""
        there = (process.calls for process in self._pool.there())
        return sum(calls.given_up for calls in there if isinstance(calls, MultiplexedCalls))

    def _run_on(self, process: Process) -> Function:
        return partial(self._warmed, process)

    def _warmed(self, process: Process, inputs: Inputs, call: Call) -> Any:
        return self._wait(_at_once(process).run(inputs, call))

    def _start_on(self, process: Process, call: Call) -> None:
        self._wait(_at_once(process).start(call))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """On a thread: what the work on the loop gives."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class OnLoopListsModel(OnLoopModel):
    """One that takes a batch as a list."""

    async def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        """What the model answers to each of the requests; raises as `infer`."""
        call = BatchCall(calls)
        while True:
            with suppress(NotBegun):
                async with self._process(call) as process:
                    return await _at_once(process).run_list(inputs, call)


class OnLoopDecoupledModel(OnLoopModel):
    """One that yields its answers."""

    async def infer(  # type: ignore[override]  # A model's `infer` is any of the four kinds of functions.
        self, inputs: Inputs, call: Call
    ) -> AsyncGenerator[Any, None]:
        """The answers as the model yields them; raises as `OnLoopModel.infer`."""
        while True:
            with suppress(NotBegun):
                async with (
                    self._process(call) as process,
                    aclosing(_at_once(process).stream(inputs, call)) as answers,
                ):
                    async for answer in answers:
                        yield answer
                        del answer
                return

    def _warmed(self, process: Process, inputs: Inputs, call: Call) -> Generator[Any, None, None]:
        answers = _at_once(process).stream(inputs, call)
        try:
            while (answer := self._wait(_next(answers))) is not None:
                yield answer
        finally:
            self._wait(_closed(answers))


async def _next(answers: AsyncGenerator[Any, None]) -> Any:
    return await anext(answers, None)


async def _closed(answers: AsyncGenerator[Any, None]) -> None:
    await answers.aclose()


def _at_once(process: Process) -> MultiplexedCalls:
    calls = process.calls
    if calls is None:
        raise NotBegun(process.lost)  # It has ended since.
    assert isinstance(calls, MultiplexedCalls)
    return calls
