"""grpc.aio without a socket: requests that are read ahead, bursts, ends that are counted, sends that fail."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.waiting import until
from triglot.core.call import Call
from triglot.core.errors import Code, Internal, InvalidArgument, ServingError
from triglot.core.operation import EVERYTHING, Operation
from triglot.core.running import CallCancelled, Defer, Running, Sink
from triglot.protocols.rows import InferenceHandler, Kind, Method
from triglot.telemetry.store import Telemetry
from triglot.transports.aio import gathering
from triglot.transports.aio.calls import MAX_BYTES, MAX_REQUESTS, AioRequests, answer
from triglot.transports.aio.gathering import MAX_CALLS, MAX_SKIPPED, MIN_CALLS, PROBE_INTERVAL, Gathering
from triglot.transports.aio.server import _Rows
from triglot.transports.aio.unsent import UnsentAnswers
from triglot.transports.grpc_calls import GrpcCalls
from triglot.transports.http2.core.limits import Limits
from triglot.transports.request_bytes import RequestBytes

METHOD = "/inference.GRPCInferenceService/ModelInfer"

# --- requests of a stream: read ahead, within bounds ---

END = object()


class Client:
    """Sends these, and then an error or the end."""

    def __init__(self, requests: Iterator[bytes], error: Exception | None = None) -> None:
        self.read_so_far = 0
        self._requests = requests
        self._error = error

    async def read(self) -> object:
        await asyncio.sleep(0)
        for request in self._requests:
            self.read_so_far += 1
            return request
        if self._error is not None:
            raise self._error
        return END


class Taker:
    """Takes what has arrived whenever it is notified, once it is `open`."""

    def __init__(self, requests: AioRequests) -> None:
        self.requests = requests
        self.open = True
        self.got: list[bytes] = []
        self.errors: list[Exception] = []

    def came(self) -> None:
        try:
            while self.open and (taken := self.requests.take()) is not None:
                self.got.append(taken)
        except InvalidArgument as error:
            self.errors.append(error)

    @property
    def is_over(self) -> bool:
        return self.requests.has_ended


@asynccontextmanager
async def listening(client: Client) -> AsyncIterator[Taker]:
    requests = AioRequests(client.read, END)
    taker = Taker(requests)
    requests.listen(taker.came)
    try:
        yield taker
    finally:
        await requests.close()


@pytest.mark.parametrize("count", [0, 1, 2, MAX_REQUESTS, 10 * MAX_REQUESTS])
async def test_all_of_them_in_order(count: int) -> None:
    async with listening(Client(b"%d" % number for number in range(count))) as taker:
        await until(lambda: taker.is_over)
    assert taker.got == [b"%d" % number for number in range(count)]


@pytest.mark.parametrize(("size", "held"), [(1, MAX_REQUESTS), (MAX_BYTES // 4, 5), (MAX_BYTES + 1, 1)])
async def test_no_more_are_read_ahead_than_may_be(size: int, held: int) -> None:
    client = Client(bytes(size) for _ in range(3 * MAX_REQUESTS))
    async with listening(client) as taker:
        taker.open = False
        await until(lambda: client.read_so_far == held)
        for _ in range(100):  # It would read on in the loop's next turns.
            await asyncio.sleep(0)
        assert client.read_so_far == held
        taker.open = True
        taker.came()
        await until(lambda: taker.is_over)
    assert len(taker.got) == 3 * MAX_REQUESTS


async def test_an_error_comes_after_what_came_before_it() -> None:
    async with listening(Client(iter([b"1", b"2"]), InvalidArgument("no such message"))) as taker:
        await until(lambda: taker.errors)
        assert taker.is_over
    assert taker.got == [b"1", b"2"]
    assert [str(error) for error in taker.errors] == ["no such message"]


async def test_who_has_closed_it_hears_no_more() -> None:
    client = Client(b"%d" % number for number in range(10 * MAX_REQUESTS))
    async with listening(client) as taker:
        taker.open = False
        await until(lambda: client.read_so_far)
        await taker.requests.close()
        read = client.read_so_far
        taker.open = True
        for _ in range(100):
            await asyncio.sleep(0)
        assert client.read_so_far == read
    assert taker.got == []


# --- calls that arrive close together wait for each other, and single ones do not wait ---

CALLS = 8


@pytest.fixture(name="patient")
def _patient(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    """One whose calls wait until there are enough."""
    monkeypatch.setattr(gathering, "WAIT_SECONDS", 60)
    return Gathering()


def joined(calls: Gathering, count: int) -> list[asyncio.Future[None]]:
    turns = [calls.join() for _ in range(count)]
    assert None not in turns
    return [turn for turn in turns if turn is not None]


async def burst(calls: Gathering, count: int) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*joined(calls, count))


async def test_a_burst_ends_after_a_moment_and_the_next_ones_with_as_many_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Gathering()
    await burst(calls, CALLS)
    monkeypatch.setattr(gathering, "WAIT_SECONDS", 60)
    for _ in range(PROBE_INTERVAL - 1):
        first = joined(calls, CALLS - 1)
        assert not any(turn.done() for turn in first)
        (last,) = joined(calls, 1)
        assert all(turn.done() for turn in (*first, last))
    # Now and then more are let in.
    assert not any(turn.done() for turn in joined(calls, CALLS))


async def test_no_burst_is_larger_than_the_limit(patient: Gathering) -> None:
    assert all(turn.done() for turn in joined(patient, MAX_CALLS))
    assert not any(turn.done() for turn in joined(patient, 1))


async def test_calls_that_come_singly_soon_wait_no_more() -> None:
    calls = Gathering()
    waited = 0
    for _ in range(3 * MAX_SKIPPED):
        if (turn := calls.join()) is not None:
            waited += 1
            await turn
    assert waited < 15
    # The next ones that come together find each other again.
    while calls.join() is None:
        pass
    await burst(calls, MIN_CALLS - 1)
    assert calls.join() is not None


async def test_cancelled_call_delays_no_other() -> None:
    calls = Gathering()
    first, *others = joined(calls, MIN_CALLS)
    first.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*others)


# --- calls that are cancelled as their outcome comes: each is counted once ---


class Context:
    """Of a call without metadata and deadline; what it was refused with."""

    refused: grpc.StatusCode | None = None

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.refused = code

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Scripted(InferenceHandler, Running):
    """Inference of one call, whose outcome the test reports."""

    def __init__(self) -> None:
        self.over = False
        self.task = None

    def start(self, request: Any, call: Call, sink: Sink, defer: Defer | None = None, /) -> Running:
        self.sink = sink
        return self

    def answer(self, response: Any, request: Any, /) -> bytes:
        return b"ok"

    def map_error(self, error: ServingError, request: Any, call: Call, /) -> ServingError:
        return error

    def end(self, error: ServingError | None = None) -> None:
        self.over = True
        if error is None:
            self.sink.send(b"ok")
        self.sink.end(error)

    def cancel(self) -> None:
        if not self.over:
            self.end(CallCancelled("the call was cancelled"))

    def resume(self) -> None:
        pass


@pytest.mark.parametrize("first", ["cancelled", "ended", "alone"])
@pytest.mark.parametrize("error", [None, Internal("no")])
async def test_a_cancellation_in_the_same_turn(error: Internal | None, first: str) -> None:
    telemetry, inference, context = Telemetry(), Scripted(), Context()
    method = Method("ModelInfer", Kind.UNARY, Operation.INFER, bytes, None, bytes, inference=inference)
    endpoint = telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True)
    handler = GrpcCalls(RequestBytes(0)).row(method, endpoint)
    task = asyncio.ensure_future(answer(handler, b"", context, EVERYTHING))
    await asyncio.sleep(0)
    if first == "ended":
        inference.end(error)
    task.cancel()
    if first == "cancelled":
        inference.end(error)
    with pytest.raises(asyncio.CancelledError):
        await task
    counted_codes = [kind.code for _, kind, stats in telemetry.calls() for _ in range(stats.latency.count)]
    expected = Code.OK if error is None else Code.INTERNAL
    assert counted_codes == [Code.CANCELLED if first == "alone" else expected]
    assert [endpoint.in_flight for endpoint in telemetry.endpoints()] == [0]
    assert context.refused is None


# --- a response that the client does not take, because of its size, leaves one line in the log ---


class Details:
    """Of a call."""

    method = METHOD


async def failed(error: Exception) -> None:
    """A call's task as grpc.aio runs it: it looks the handler up, and fails when it sends the response."""
    rows = _Rows({}, UnsentAnswers(Limits()), 1)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def call() -> None:
        rows.service(Details)
        raise error

    task = asyncio.create_task(call())
    await asyncio.wait([task])
    await asyncio.sleep(0)
    del task
    gc.collect()
    assert reported == []


async def test_a_send_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await failed(grpc.aio.InternalError('Failed "execute_batch"'))
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert METHOD in record.getMessage()


async def test_any_other_failure_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    await failed(ValueError("ours"))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info
