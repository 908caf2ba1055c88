"""Requests that are submitted to a servable, or put into a schedule, without a data plane."""

from __future__ import annotations

import asyncio
from typing import Any

from triglot.core.awaiting import Responses
from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.running import Sink
from triglot.executors.work import Inputs, Receiver, Work
from triglot.scheduling.servable import Servable


class _Unchecked(Receiver):
    """Passes answers to the sink as they are."""

    __slots__ = ()

    def respond(self, work: Work, answer: Any) -> bool:
        return work.sink.send(answer)

    def finish(self, work: Work, error: ServingError | None) -> None:
        if error is None and work.answers_once:
            work.sink.send(work.result)
        work.sink.end(error)


UNCHECKED = _Unchecked()


def direct_stream(servable: Servable, inputs: Inputs, call: Call, *, streams: bool = True) -> Responses:
    """The responses of a call that takes any number."""

    def start(sink: Sink) -> Work:
        work = Work(inputs, call, sink, UNCHECKED, streams=streams)
        work.leased = True
        servable.submit(work)
        return work

    return Responses(start)


async def direct_infer(servable: Servable, inputs: Inputs, call: Call) -> Any:
    """The response of a call that takes one."""
    return await direct_stream(servable, inputs, call, streams=False).only()


class _FutureSink(Sink):
    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def send(self, response: Any, /) -> bool:
        if not self._future.done():
            self._future.set_result(response)
        return True

    def end(self, error: ServingError | None, /) -> None:
        if error is not None and not self._future.done():
            self._future.set_exception(error)


class FutureWork(Work):
    """Work whose outcome is that of its `future`."""

    def __init__(self, inputs: Inputs, call: Call, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.future: asyncio.Future[Any] = (loop or asyncio.get_running_loop()).create_future()
        super().__init__(inputs, call, _FutureSink(self.future), UNCHECKED)
