"""Calls that repeat others over grpc.aio, which are cancelled as their outcome comes: each is counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.repeated import Reply
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Telemetry
from triglot.transports.aio_repeats import answer_repeated


class Handler:
    """Of one call, whose outcome the test tells."""

    left = Code.CANCELLED

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        endpoint = self.telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True)
        self.observed = Observation(endpoint, Call())
        self.replies: list[Reply] = []
        self.over = False

    def repeat(self, _: bytes, __: Any, reply: Reply) -> Handler:
        self.replies.append(reply)
        return self

    def tell(self, how: str) -> None:
        self.over = True
        if how == "respond":
            self.observed.finish(2)
            self.replies[0].respond(b"ok")
        else:
            self.replies[0].conclude(asyncio.get_running_loop().create_future(), self.observed)

    def cancel(self) -> bool:
        if self.over:
            return False
        self.over = True
        self.observed.end(self.replies[0].given_up())
        return True

    def cancelling(self) -> int:
        return 0

    def counted(self) -> list[Code]:
        return [kind.code for _, kind, stats in self.telemetry.calls() for _ in range(stats.latency.count)]


@pytest.mark.parametrize("first", ["cancelled", "told", "alone"])
@pytest.mark.parametrize("how", ["respond", "conclude"])
async def test_a_cancellation_in_the_same_turn(how: str, first: str) -> None:
    handler: Any = Handler()
    task = asyncio.ensure_future(answer_repeated(handler, b"", None))
    await asyncio.sleep(0)
    if first == "told":
        handler.tell(how)
    task.cancel()
    if first == "cancelled":
        handler.tell(how)
    with pytest.raises(asyncio.CancelledError):
        await task
    told_well = how == "respond" and first != "alone"
    assert handler.counted() == [Code.OK if told_well else Code.CANCELLED]
    assert [one.in_flight for one in handler.telemetry.endpoints()] == [0]
