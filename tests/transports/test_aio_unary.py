"""GrpcCalls over grpc.aio that are cancelled as their outcome comes: each is counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triglot.core.call import Call
from triglot.core.errors import Code, Internal, ServingError
from triglot.core.operation import Operation
from triglot.core.permission import EVERYTHING
from triglot.core.running import Defer, Done, OnLoop
from triglot.protocols.rows import Kind, Method
from triglot.telemetry.store import Telemetry
from triglot.transports.aio.unary import answer
from triglot.transports.grpc_calls import GrpcCalls
from triglot.transports.request_bytes import RequestBytes


class Context:
    """Of a call without metadata and deadline; what it was refused with."""

    refused: Code | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Scripted:
    """Inference of one call, whose outcome the test reports."""

    def __init__(self) -> None:
        self.error: ServingError | None = None
        self.cancelled = False
        self.over = False
        self.task = None

    def submit(self, request: Any, call: Call, done: Done, defer: Defer | None = None, /) -> OnLoop:
        self.done = done
        return self

    def answer(self, outcome: Any, request: Any, /) -> bytes:
        return b"ok"

    def map_error(self, error: ServingError, outcome: Any, request: Any, /) -> ServingError:
        return error

    def end(self, error: Internal | None = None) -> None:
        self.error, self.over = error, True
        self.done(self)

    def cancel(self) -> None:
        if not self.over:
            self.cancelled = True
            self.end()


async def _refuse(context: Context, code: Code, *_: object) -> None:
    context.refused = code


@pytest.mark.parametrize("first", ["cancelled", "ended", "alone"])
@pytest.mark.parametrize("error", [None, Internal("no")])
async def test_a_cancellation_in_the_same_turn(error: Internal | None, first: str) -> None:
    telemetry, inference, context = Telemetry(), Scripted(), Context()
    method = Method("ModelInfer", Kind.UNARY, Operation.INFER, bytes, None, bytes, inference=inference)
    endpoint = telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True)
    handler = GrpcCalls(_refuse, RuntimeError, RequestBytes(0)).unary(method, endpoint)
    task = asyncio.ensure_future(answer(handler, b"", context, EVERYTHING))
    await asyncio.sleep(0)
    if first == "ended":
        inference.end(error)
    task.cancel()
    if first == "cancelled":
        inference.end(error)
    with pytest.raises(asyncio.CancelledError):
        await task
    counted = [kind.code for _, kind, stats in telemetry.calls() for _ in range(stats.latency.count)]
    expected = Code.OK if error is None else Code.INTERNAL
    assert counted == [Code.CANCELLED if first == "alone" else expected]
    assert [one.in_flight for one in telemetry.endpoints()] == [0]
    assert context.refused is None
