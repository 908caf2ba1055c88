"""`CallTask` against what a task of asyncio's does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from triglot.core.own_task import as_task
from triglot.transports.call_task import CallTask

Body = Callable[[], Coroutine[Any, Any, None]]
VALUE = ContextVar("VALUE", default="outside")


class Run:
    """A `CallTask` that was started by a callback of the loop, as a connection does it."""

    def __init__(self, body: Body) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[CallTask] = self.loop.create_future()
        self.task = CallTask(body(), self.loop, self.ended.set_result)

    async def started(self) -> CallTask:
        """As soon as it waits for the first time, or has ended."""
        begun: asyncio.Future[None] = self.loop.create_future()

        def start() -> None:
            self.task.start()
            begun.set_result(None)

        self.loop.call_soon(start)
        await begun
        return self.task

    async def over(self) -> CallTask:
        async with asyncio.timeout(10):
            assert await self.ended is self.task
        assert self.task.done()
        return self.task


async def test_what_never_waits_has_ended_when_start_returns() -> None:
    seen: list[str] = []

    async def body() -> None:
        seen.append("ran")

    run = Run(body)
    assert seen == []
    assert (await run.started()).done()
    assert seen == ["ran"]
    assert not run.task.cancel()


async def test_it_goes_on_with_what_it_waits_for() -> None:
    arrival = asyncio.get_running_loop().create_future()
    seen: list[Any] = []

    async def body() -> None:
        seen.append(await arrival)
        await asyncio.sleep(0)
        seen.append(await asyncio.sleep(0.001, "slept"))

    run = Run(body)
    assert not (await run.started()).done()
    arrival.set_result("arrived")
    await run.over()
    assert seen == ["arrived", "slept"]


async def test_an_error_of_what_it_waits_for() -> None:
    failing = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def body() -> None:
        try:
            await failing
        except KeyError as error:
            seen.append(repr(error))

    run = Run(body)
    await run.started()
    failing.set_exception(KeyError("missing"))
    await run.over()
    assert seen == ["KeyError('missing')"]


@pytest.mark.parametrize("promoted", [False, True])
async def test_cancelled_where_it_waits(promoted: bool) -> None:
    waited = asyncio.get_running_loop().create_future()
    seen: list[Any] = []

    async def body() -> None:
        if promoted:
            await as_task()
        try:
            await waited
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            assert current is not None
            seen.append((error.args, current.cancelling(), current.uncancel()))

    run = Run(body)
    task = await run.started()
    await asyncio.sleep(0)
    assert task.cancel("enough")
    assert task.cancelling() == 1
    await run.over()
    assert seen == [(("enough",), 1, 0)]
    assert waited.cancelled()


async def test_cancelled_while_it_runs() -> None:
    seen: list[str] = []

    async def body() -> None:
        run.task.cancel()
        seen.append("goes on")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")

    run = Run(body)
    await run.started()
    await run.over()
    assert seen == ["goes on", "cancelled"]


async def test_cancelled_before_it_becomes_a_task() -> None:
    seen: list[str] = []

    async def body() -> None:
        run.task.cancel()
        try:
            await as_task()
        except asyncio.CancelledError:
            seen.append("cancelled")

    run = Run(body)
    await run.started()
    await run.over()
    assert seen == ["cancelled"]


async def test_a_cancellation_that_is_swallowed() -> None:
    seen: list[str] = []

    async def body() -> None:
        for name in ("first", "second"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append(name)

    run = Run(body)
    task = await run.started()
    for count in (1, 2):
        task.cancel()
        assert task.cancelling() == count
        await asyncio.sleep(0)
    await run.over()
    assert seen == ["first", "second"]


async def test_what_asyncio_builds_on_the_current_task() -> None:
    seen: list[str] = []

    async def body() -> None:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        except TimeoutError:
            seen.append("late")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_fails())
                await asyncio.sleep(60)
        except* ValueError:
            seen.append("one of the group failed")

    run = Run(body)
    await run.started()
    await run.over()
    assert seen == ["late", "one of the group failed"]
    assert run.task.cancelling() == 0


async def _fails() -> None:
    raise ValueError("not this")


async def test_users_code_has_a_whole_task() -> None:
    seen: list[Any] = []

    async def body() -> None:
        seen.append(type(asyncio.current_task()))
        await as_task()
        current = asyncio.current_task()
        assert isinstance(current, asyncio.Task)
        await as_task()
        assert asyncio.current_task() is current
        assert current in asyncio.all_tasks()
        seen.append(VALUE.get())

    run = Run(body)
    await run.started()
    await run.over()
    assert seen == [CallTask, "outside"]


async def test_a_context_of_its_own() -> None:
    seen: list[str] = []

    async def body() -> None:
        VALUE.set("inside")
        await asyncio.sleep(0)
        seen.append(VALUE.get())
        await as_task()
        seen.append(VALUE.get())

    run = Run(body)
    await run.started()
    assert VALUE.get() == "outside"
    await run.over()
    assert seen == ["inside", "inside"]
    assert VALUE.get() == "outside"


async def test_started_where_a_task_runs_already() -> None:
    seen: list[bool] = []

    async def body() -> None:
        seen.append(id(asyncio.current_task()) == id(run.task))

    run = Run(body)
    run.task.start()
    assert seen == []
    await run.over()
    assert seen == [True]
