"""However a call's deadline came about, and wherever its request is then: the call ends, and is let go of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

import triglot
from tests.e2e.busy_servers import EVERY_INTERFACE, PARAMETERS, REST, SOON, ask, busy, until_released
from tests.process import SECONDS
from tests.protocol_clients.every_protocol import MODEL, Interface, infer_message, kserve_grpc, kserve_stream
from tests.scheduling.scripted_models import Inputs, Plain, Scripted
from tests.transports.live import live
from tests.waiting import ever_later, until
from triglot.core.errors import Code
from triglot.model.scheduling import DynamicBatching, QueuePolicy

pytestmark = pytest.mark.both_transports

# --- the server's default ---


@EVERY_INTERFACE
async def test_the_servers_default_ends_a_running_call(interface: Interface) -> None:
    for later in ever_later(SOON):
        model = Scripted(open_gate=False)
        async with live({MODEL: model}, default_timeout=later) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
            assert f"the server's default_timeout of {later:g} seconds passed " in outcome.text
            if not model.calls:
                continue
            assert "passed while the model" in outcome.text
            assert model.calls[0].cancelled
            await until_released(server)
            model.open_point("infer")
            # A deadline of the client's is the one that counts.
            assert (await kserve_grpc(server, 2, timeout=SECONDS)).value == 4
            break


@EVERY_INTERFACE
async def test_a_model_that_sees_the_deadline_first_is_no_other_error(interface: Interface) -> None:
    begun = asyncio.Event()

    async def infer(inputs: Inputs, call: triglot.Call) -> Any:
        begun.set()
        while not call.cancelled:  # Nothing else runs on the loop meanwhile: nobody else can see it.
            pass
        raise triglot.Cancelled("given up")

    for later in ever_later(SOON):
        async with live({MODEL: Plain(infer)}, default_timeout=later) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
        if begun.is_set():
            assert f"default_timeout of {later:g} seconds passed while the model" in outcome.text
            break


@EVERY_INTERFACE
async def test_the_servers_default_ends_a_waiting_call(interface: Interface) -> None:
    for later in ever_later(SOON):
        model = Scripted(open_gate=False)
        async with busy(model, default_timeout=later) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
            assert f"default_timeout of {later:g} seconds passed " in outcome.text
            await until(lambda: server.leases() == 1)
        assert model.started == [0]
        if "while the request waited in the queue" in outcome.text:
            break


@EVERY_INTERFACE
async def test_code_on_the_loop_is_cancelled_at_the_deadline(interface: Interface) -> None:
    begun, finished = asyncio.Event(), asyncio.Event()

    async def infer(inputs: Inputs) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            finished.set()

    for later in ever_later(SOON):
        async with live({MODEL: Plain(infer)}, default_timeout=later) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
            assert "default_timeout" in outcome.text
            await until_released(server)
        if begun.is_set():
            assert finished.is_set()
            break


@EVERY_INTERFACE
async def test_code_on_the_loop_that_outlasts_the_deadline_is_late(interface: Interface) -> None:
    """It is waited for, since nothing else can end it; what it answers then is no answer."""
    cancelled, go_on = asyncio.Event(), asyncio.Event()

    async def infer(inputs: Inputs) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
        await go_on.wait()
        return {"y": inputs["x"]}

    for later in ever_later(SOON):
        async with live({MODEL: Plain(infer)}, default_timeout=later) as server:
            asked = asyncio.ensure_future(ask(server, interface))
            begun = asyncio.ensure_future(cancelled.wait())
            await asyncio.wait([asked, begun], return_when=asyncio.FIRST_COMPLETED)
            go_on.set()
            begun.cancel()
            outcome = await asked
            assert outcome.code is Code.DEADLINE_EXCEEDED
            await until_released(server)
        if cancelled.is_set():
            assert f"default_timeout of {later:g} seconds passed while the model ran" in outcome.text
            break


async def test_each_request_of_a_stream_has_a_deadline_of_its_own() -> None:
    model = Scripted(open_gate=False)
    async with live({MODEL: model}, default_timeout=SOON) as server:
        opened: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def requests() -> AsyncIterator[bytes]:
            while (request := await opened.get()) is not None:
                yield request

        answers = server.stream_infer(requests())
        for number in range(3):
            opened.put_nowait(infer_message(number).SerializeToString())
            answer = await answers.read()
            assert "default_timeout" in answer.error_message
        opened.put_nowait(None)
        assert await answers.read() is grpc.aio.EOF
        await until_released(server)
        model.open_point("infer")


# --- a request's own timeout ---


class Batched(Scripted):
    """Requests are joined."""

    max_batch_size = 4
    dynamic_batching = DynamicBatching()


class TimedQueue(Batched):
    """Its queue has a timeout, which requests cannot change."""

    dynamic_batching = DynamicBatching(policy=QueuePolicy(timeout=1000))


class NoDefault(Batched):
    """Requests may shorten the queue's timeout, but it has none."""

    dynamic_batching = DynamicBatching(policy=QueuePolicy(allow_timeout_override=True))


class Bounded(Batched):
    """Its policies bound the number of queued requests only."""

    dynamic_batching = DynamicBatching(
        priority_levels=2,
        default_priority_level=1,
        policy=QueuePolicy(max_queue_size=3),
        policies={2: QueuePolicy(max_queue_size=1)},
    )


class Overridden(Batched):
    """Requests may shorten the queue's timeout."""

    dynamic_batching = DynamicBatching(policy=QueuePolicy(timeout=1000, allow_timeout_override=True))


class OverriddenAtLevel2(Batched):
    """Requests of one priority level may shorten the queue's timeout."""

    dynamic_batching = DynamicBatching(
        priority_levels=2,
        default_priority_level=1,
        policies={2: QueuePolicy(timeout=1000, allow_timeout_override=True)},
    )


@PARAMETERS
@pytest.mark.parametrize(
    ("kind", "priority"),
    [
        (Scripted, 0),
        (Batched, 0),
        (TimedQueue, 0),
        (NoDefault, 0),
        (Bounded, 0),
        (OverriddenAtLevel2, 0),
        (OverriddenAtLevel2, 1),
    ],
)
async def test_timeout_that_no_queue_policy_allows_is_ignored(
    interface: Interface, kind: type[Scripted], priority: int
) -> None:
    model = kind(open_gate=False)
    async with busy(model) as server:
        timeouts = (1, 30, 1000)
        waiting = [
            asyncio.ensure_future(ask(server, interface, parameters={"timeout": timeout, "priority": priority}))
            for timeout in timeouts
        ]
        await until(lambda: server.leases() == 1 + len(timeouts))
        model.open_point("infer")
        assert [(await task).code for task in waiting] == [Code.OK] * len(timeouts)
        assert all(call.deadline is None for call in model.calls[1:])


@PARAMETERS
@pytest.mark.parametrize(("kind", "priority"), [(Overridden, 0), (OverriddenAtLevel2, 2)])
async def test_timeout_that_the_queue_policy_allows_ends_a_queued_request(
    interface: Interface, kind: type[Scripted], priority: int
) -> None:
    model = kind(open_gate=False)
    async with busy(model) as server:
        outcome = await ask(server, interface, parameters={"timeout": 1000, "priority": priority})
        assert outcome.text.endswith("Request timeout expired")
        assert interface is kserve_stream or outcome.code is Code.UNAVAILABLE
    assert model.started == [0]


@EVERY_INTERFACE
async def test_the_servers_default_ends_a_member_of_a_batch(interface: Interface) -> None:
    model = Batched(open_gate=False)
    async with live({MODEL: model}, default_timeout=SOON) as server:
        first = asyncio.ensure_future(kserve_grpc(server, 0, timeout=SECONDS))
        await model.until_at("infer")
        outcome = await ask(server, interface)
        assert outcome.code is Code.DEADLINE_EXCEEDED
        assert "default_timeout" in outcome.text
        model.open_point("infer")
        assert (await first).code is Code.OK
        await until_released(server)
    assert model.started == [0]


# --- REST ---


@pytest.mark.parametrize("interface", REST.values(), ids=REST)
async def test_a_rest_calls_time_is_over(interface: Interface) -> None:
    for later in ever_later(SOON):
        model = Scripted(open_gate=False)
        async with live({MODEL: model}, rest_timeout=later, default_timeout=1000.0) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
            assert f"the server's rest_timeout of {later:g} seconds passed " in outcome.text
            await until_released(server)
            model.open_point("infer")
        if model.calls:
            assert model.calls[0].cancelled
            break


async def test_a_body_that_does_not_come_in_time() -> None:
    async with live({MODEL: Scripted()}, rest_timeout=SOON) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.rest_port)
        writer.write(b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"}"), SECONDS)
        assert head.startswith(b"HTTP/1.1 504 ")
        assert b"the server's rest_timeout of 0.05 seconds passed before the response was ready" in head
        writer.close()
