"""Long JSON of REST requests is parsed on a thread, one text at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.scheduling.scripted_models import Plain
from tests.transports.live import live
from tests.transports.test_request_bytes import INFER, padded
from triglot.transports.off_loop import OneAtATime

KIB = 1024


class Counting(ThreadPoolExecutor):
    """The loop's threads, which count what they are given."""

    given = 0

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self.given += 1
        return super().submit(work, *arguments, **named)


@pytest.mark.parametrize(("size", "threads"), [(32 * KIB, 0), (32 * KIB + 1, 1)])
async def test_texts_above_32_kib_are_parsed_on_a_thread(size: int, threads: int) -> None:
    asyncio.get_running_loop().set_default_executor(counting := Counting())
    # Nothing else goes to a thread meanwhile, such as what gives memory back.
    async with live({"same": Plain(lambda inputs: {"y": inputs["x"]})}, malloc="system") as here:
        before = counting.given
        url = f"http://127.0.0.1:{here.server.rest_port}{INFER}"
        async with here.session.post(url, data=padded(size)) as answer:
            assert answer.status == 200
        assert counting.given - before == threads


async def test_one_at_a_time_even_if_its_caller_leaves() -> None:
    begun: list[int] = []
    gate = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        assert number or gate.wait(60)
        return number

    texts = OneAtATime()
    tasks = [asyncio.create_task(texts.run(partial(work, number))) for number in range(4)]
    try:
        await asyncio.sleep(0)
        for left in (tasks[0], tasks[2]):  # The one that runs, and one that waits.
            left.cancel()
        await asyncio.wait(tasks[:1])
        await asyncio.to_thread(int)  # What was given to threads before has begun.
        assert begun == [0]
    finally:
        gate.set()
    assert [await tasks[number] for number in (1, 3)] == [1, 3]
    assert begun == [0, 1, 3]
