"""A caller that leaves: its request is not run, or the model sees it, and the request is let go of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from busy_servers import EVERY_INTERFACE, SOON, ask, busy, until_released
from live import Live, live
from scripted_models import Inputs, Plain, Scripted

from process import SECONDS
from protocol_clients.every_protocol import MODEL, STREAMS, Interface, kserve_rest
from triglot.core.errors import Code
from waiting import ever_later, until

pytestmark = pytest.mark.both_transports


@EVERY_INTERFACE
async def test_a_caller_that_leaves_the_queue_is_never_run(interface: Interface) -> None:
    model = Scripted(open_gate=False)
    async with busy(model) as server:
        leaving = asyncio.ensure_future(interface(server, 1))
        await until(lambda: server.leases() == 2)
        leaving.cancel()
        await until(lambda: server.leases() == 1)
    assert model.started == [0]


@EVERY_INTERFACE
async def test_a_running_model_sees_that_its_caller_left(interface: Interface) -> None:
    model = Scripted(open_gate=False)
    async with live({MODEL: model}) as server:
        leaving = asyncio.ensure_future(interface(server, 1))
        await model.until_at("infer")
        leaving.cancel()
        await until(lambda: model.calls[0].cancelled)
        await until_released(server)
        model.open_point("infer")
        assert (await ask(server, interface, 2)).value == 4


@EVERY_INTERFACE
async def test_code_on_the_loop_is_cancelled_when_its_caller_leaves(interface: Interface) -> None:
    runs, finished = asyncio.Event(), asyncio.Event()

    async def infer(inputs: Inputs) -> Any:
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            finished.set()

    async with live({MODEL: Plain(infer)}) as server:
        leaving = asyncio.ensure_future(interface(server, 1))
        await asyncio.wait_for(runs.wait(), SECONDS)
        leaving.cancel()
        await asyncio.wait_for(finished.wait(), SECONDS)
        await until_released(server)


async def test_a_client_that_leaves_while_it_sends() -> None:
    async with live({MODEL: Scripted()}, max_connections=1) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.server.rest_port)
        writer.write(b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await until_code(server, Code.UNAVAILABLE)  # It is the one call that may be open.
        writer.close()
        await until_code(server, Code.OK)


async def until_code(server: Live, code: Code) -> None:
    async with asyncio.timeout(SECONDS):
        while (await kserve_rest(server, 1)).code is not code:
            pass


# --- streams ---


class Steps:
    """A generator's body: one answer for each time that the test lets it continue; knows when it is closed."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(1)
        self.yields = 0
        self.closed = threading.Event()

    def on_thread(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
        try:
            while self.go.acquire(timeout=SECONDS):
                self.yields += 1
                yield {"y": inputs["x"]}
        finally:
            self.closed.set()

    async def on_loop(self, inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        try:
            while await asyncio.to_thread(self.go.acquire, timeout=SECONDS):
                self.yields += 1
                yield {"y": inputs["x"]}
        finally:
            self.closed.set()


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("interface", STREAMS.values(), ids=STREAMS)
async def test_a_streaming_model_is_closed_at_its_next_answer(interface: Interface, on_loop: bool) -> None:
    for later in ever_later(SOON):
        steps = Steps()
        model = Plain(steps.on_loop if on_loop else steps.on_thread)
        async with live({MODEL: model}, default_timeout=later) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
            assert "default_timeout" in outcome.text
            await until_released(server)
            if not steps.yields:
                continue
            assert "passed while the model was streaming" in outcome.text
            steps.go.release(2)
            assert await asyncio.to_thread(steps.closed.wait, SECONDS)
            assert steps.yields <= 2
            break
