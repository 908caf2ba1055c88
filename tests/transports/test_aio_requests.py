"""Requests of a stream over grpc.aio: read ahead, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from triglot.core.errors import InvalidArgument
from triglot.transports.aio.calls import MAX_BYTES, MAX_REQUESTS, AioRequests
from waiting import until

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
