"""GrpcCalls over grpc.aio that are cancelled as their outcome comes: each is counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from triglot.core.call import Call
from triglot.core.errors import Code, Internal, ServingError
from triglot.core.operation import EVERYTHING, Operation
from triglot.core.running import CallCancelled, Defer, Running, Sink
from triglot.protocols.rows import InferenceHandler, Kind, Method
from triglot.telemetry.store import Telemetry
from triglot.transports.aio.calls import answer
from triglot.transports.grpc_calls import GrpcCalls
from triglot.transports.request_bytes import RequestBytes


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
