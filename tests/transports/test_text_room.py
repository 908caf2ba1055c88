"""JSON bodies that are longer than there is room for at a time: which wait, continue, or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.scheduling.scripted_models import Plain
from tests.transports.h2_peers import SECONDS, Frame, data
from tests.transports.live import Live, live
from tests.transports.test_http_requests import Answer
from tests.transports.test_request_bytes import Http1, Http2, Make, Upload, held, padded
from tests.waiting import until
from triglot.transports import text_room
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits
from triglot.transports.text_room import FREE_BYTES, MIN_PROGRESS, TextRoom

pytestmark = pytest.mark.both_transports

MIB = 2**20
SIZE = 6 * MIB
ROOM = 4 * MIB
BODY = padded(SIZE)
ReadFrame = Callable[[], Coroutine[Any, Any, Frame | None]]


class Patient(Http2):
    """As `Http2`, and sends no more than the server has opened a window for."""

    async def begin(self, here: Live, stack: AsyncExitStack) -> None:
        await super().begin(here, stack)
        self._window = Limits().stream_window
        self._opened = asyncio.Event()
        self._answer = asyncio.create_task(super().answer())
        stack.callback(self._answer.cancel)
        self._client.frame = self._watched(self._client.frame)  # type: ignore[method-assign]

    def _watched(self, frame: ReadFrame) -> ReadFrame:
        async def watched() -> Frame | None:
            got = await frame()
            if got is not None and got.kind == frames.WINDOW_UPDATE and got.stream == 1:
                self._window += int.from_bytes(got.payload)
                self._opened.set()
            return got

        return watched

    async def send(self, part: bytes, *, end: bool = False) -> None:
        for at in range(0, len(part), 16_000):
            piece = part[at : at + 16_000]
            while self._window < len(piece):
                self._opened.clear()
                await self._opened.wait()
            self._window -= len(piece)
            await self._client.send(data(1, piece, end=end and at + 16_000 >= len(part)))

    async def answer(self) -> Answer:
        return await self._answer


both = pytest.mark.parametrize("kind", [Http1, Patient])


@asynccontextmanager
async def served(**options: int) -> AsyncIterator[Live]:
    same = Plain(lambda inputs: {"y": inputs["x"]})
    async with live({"same": same}, grpc_transport="h2", max_json_size=2 * ROOM, **options) as here:
        yield here


def room_of(here: Live) -> TextRoom:
    http = here.server._http
    assert http is not None
    return http.calls.decoder._text_room


async def begun(kind: Make, here: Live, stack: AsyncExitStack, count: int) -> list[Upload]:
    uploads = [kind(SIZE) for _ in range(count)]
    for upload in uploads:
        await upload.begin(here, stack)
    return uploads


async def full(here: Live, first: Upload, others: list[Upload], stack: AsyncExitStack) -> None:
    """The first has filled the room, and pauses; the others want to send everything, and wait."""
    await first.send(BODY[:ROOM])
    await until(lambda: room_of(here).held == ROOM)
    for upload in others:
        sending = asyncio.create_task(upload.send(BODY, end=True))
        stack.callback(sending.cancel)
    await until(lambda: len(room_of(here).waiting) == len(others))


@both
async def test_bodies_wait_in_their_clients_for_room(kind: Make) -> None:
    async with served() as here, AsyncExitStack() as stack:
        first, *others = await begun(kind, here, stack, 6)
        await full(here, first, others, stack)
        # What is no longer than the free part never waits.
        short = padded(FREE_BYTES)
        async with here.session.post(f"{here.url}/models/same/infer", data=short) as answer:
            assert answer.status == 200
        # Each of them has a little more than that here.
        assert held(here) < ROOM + len(others) * 2 * FREE_BYTES
        await first.send(BODY[ROOM:], end=True)
        for upload in (first, *others):
            assert (await upload.answer()).status == 200
        room = room_of(here)
        assert (room.held, room.complete, room.incomplete, room.waiting) == (0, 0, {}, set())


@both
async def test_who_has_sent_nothing_takes_no_room(kind: Make) -> None:
    async with served() as here, AsyncExitStack() as stack:
        *silent, quick = await begun(kind, here, stack, 4)
        for upload in silent:
            await upload.send(BODY[:FREE_BYTES])
        await until(lambda: held(here) == len(silent) * FREE_BYTES)
        async with asyncio.timeout(SECONDS):
            await quick.send(BODY, end=True)
            assert (await quick.answer()).status == 200


@both
async def test_who_stops_while_others_wait_is_refused(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_room, "CHECK_SECONDS", 0.2)  # It is no option.
    async with served() as here, AsyncExitStack() as stack:
        first, *others = await begun(kind, here, stack, 3)
        await full(here, first, others, stack)
        refused = await first.answer()
        assert refused.status == 400
        assert "while other requests wait for memory, at least 655360 bytes in" in refused.text
        for upload in others:
            assert (await upload.answer()).status == 200
        assert room_of(here).held == held(here) == 0


@both
async def test_who_gives_up_leaves_room(kind: Make) -> None:
    async with served() as here, AsyncExitStack() as stack:
        async with AsyncExitStack() as leaving:
            (first,) = await begun(kind, here, leaving, 1)
            (second,) = await begun(kind, here, stack, 1)
            await full(here, first, [second], stack)
        assert (await second.answer()).status == 200
        assert room_of(here).held == held(here) == 0


@both
async def test_no_request_waits_for_ever(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_room, "MAX_WAIT_SECONDS", 0.2)  # As above.
    async with served() as here, AsyncExitStack() as stack:
        first, second = await begun(kind, here, stack, 2)
        await full(here, first, [], stack)
        sending = asyncio.create_task(second.send(BODY, end=True))
        stack.callback(sending.cancel)
        refused = await second.answer()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "other large JSON requests used all of the parsing memory" in refused.text
        await first.send(BODY[ROOM:], end=True)
        assert (await first.answer()).status == 200
        assert room_of(here).held == 0


@both
async def test_binary_bodies_need_no_room(kind: Make) -> None:
    async with served() as here, AsyncExitStack() as stack:
        first, second = (kind(SIZE, ("inference-header-content-length", str(SIZE))) for _ in range(2))
        for upload in (first, second):
            await upload.begin(here, stack)
        await first.send(BODY[:ROOM])
        await until(lambda: held(here) == ROOM)
        await second.send(BODY, end=True)
        assert (await second.answer()).status == 200
        assert room_of(here).held == 0


async def test_who_has_just_been_let_on_is_not_too_slow() -> None:
    room = TextRoom(2 * MIB)
    async with asyncio.timeout(SECONDS) as reading, asyncio.TaskGroup() as tasks:
        with room.place() as second, room.place() as third:
            second.reading = reading
            with room.place() as first:
                first.grow(2 * MIB)
                second.grow(2 * MIB)
                let_on = tasks.create_task(second.wait())
                await until(lambda: room.waiting == {second})
            third.grow(2 * MIB)
            waiting = tasks.create_task(third.wait())
            await let_on
            await until(lambda: room.waiting == {third})
            for gained in (0, MIN_PROGRESS, MIN_PROGRESS - 1):
                assert not second.is_too_slow
                second.grow(gained)
                room._check_slow()
            assert second.is_too_slow
            waiting.cancel()
            reading.reschedule(None)  # It would be over now.
