"""ModelStreamInfer where many requests come, and many answers leave, at the same time (spec 2.8)."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.protocols.stream_requests import asking, sending, value, y
from tests.scheduling.scripted_models import Inputs, Plain, Scripted
from tests.transports.h2_peers import Client, data, message
from tests.transports.live import METHOD, Live, live
from tests.waiting import until
from triglot import Model
from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.response_buffer import STREAM_BUFFER
from triglot.core.running import Requests, Sink
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.service import KServe
from triglot.protocols.kserve.stream import MAX_IN_A_ROW, MAX_UNSENT
from triglot.telemetry.store import Telemetry
from triglot.transports.http2.core import frames

pytestmark = pytest.mark.both_transports

STREAM = METHOD + "ModelStreamInfer"


def twice(inputs: Inputs) -> dict[str, Any]:
    return {"y": inputs["x"] * 2}


async def twice_later(inputs: Inputs) -> dict[str, Any]:
    await asyncio.sleep(0)
    return twice(inputs)


async def each(inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
    for at in range(int(inputs["x"][0])):
        yield y(at)


def kinds() -> Mapping[str, Model]:
    """One of each kind that runs in a way of its own."""
    return {"thread": Scripted(), "async": Plain(twice_later), "apart": Plain(each)}


async def opened(server: Live, window: int = 2**20) -> Client:
    """Decides itself about the bytes of each packet; his stream is the first one."""
    client = Client(*await asyncio.open_connection("127.0.0.1", server.server.grpc_port))
    await client.greet(initial_window_size=window)
    await client.send(client.headers(1, STREAM))
    return client


async def answers_of(client: Client) -> tuple[list[pb.ModelStreamInferResponse], int]:
    """All responses until the stream ends, and in how many frames."""
    body, count = b"", 0
    while (got := await client.next(frames.DATA, frames.HEADERS)).kind == frames.DATA or not got.flags & 1:
        if got.kind == frames.DATA:
            body, count = body + got.payload, count + 1
    answers = []
    while body:
        end = 5 + int.from_bytes(body[1:5])
        answers.append(pb.ModelStreamInferResponse.FromString(body[5:end]))
        body = body[end:]
    return answers, count


async def test_answers_to_what_came_together_leave_together() -> None:
    count = MAX_IN_A_ROW
    async with live(kinds(), grpc_transport="h2") as server:
        client = await opened(server)
        await client.send(*(data(1, message(asking("async", at)), end=False) for at in range(count)), data(1, b""))
        found, in_frames = await answers_of(client)
        await client.close()
    assert [value(response) for response in found] == [2 * at for at in range(count)]
    assert in_frames <= count / 2  # One, where it was read in one go.


@pytest.mark.parametrize("step", [3, 100, 5000, 10**6])
async def test_order_is_kept_for_any_cutting_and_any_model(step: int) -> None:
    chosen = random.Random(step)
    names = chosen.choices(["async", "thread", "nobody"], k=20 if step < 100 else 300)
    sent = b"".join(data(1, message(asking(name, at, str(at))), end=False) for at, name in enumerate(names))
    async with live(kinds(), grpc_transport="h2") as server:
        client = await opened(server)
        for at in range(0, len(sent), step):
            await client.send(sent[at : at + step])
        await client.send(data(1, b""))
        found, _ = await answers_of(client)
        await client.close()
        await until(lambda: server.leases() == 0)
    assert [response.infer_response.id for response in found] == [str(at) for at in range(len(names))]
    for at, (name, response) in enumerate(zip(names, found, strict=True)):
        if name == "nobody":
            assert "unknown model" in response.error_message
        else:
            assert (response.error_message, value(response)) == ("", 2 * at)


class Bursts(Requests):
    """Requests that have arrived when the stream begins, and others that arrive before the loop's next turn."""

    def __init__(self, arrived: Iterable[bytes], others: Iterable[bytes]) -> None:
        self._arrived, self._others = deque(arrived), deque(others)

    @property
    def has_ended(self) -> bool:
        return not self._arrived and not self._others

    def take(self) -> bytes | None:
        return self._arrived.popleft() if self._arrived else None

    def arrive(self) -> None:
        self._arrived += self._others
        self._others.clear()


class Collected(Sink):
    """Keeps the responses until the end."""

    def __init__(self) -> None:
        self.responses: list[bytes] = []
        self.has_ended = asyncio.Event()

    def send(self, response: bytes, /) -> bool:
        self.responses.append(response)
        return True

    def end(self, error: ServingError | None, /) -> None:
        assert error is None
        self.has_ended.set()


async def test_no_request_overtakes_another_when_the_stream_begins() -> None:
    began: list[float] = []

    async def note(inputs: Inputs) -> dict[str, Any]:
        began.append(float(inputs["x"][0]))
        return {"y": inputs["x"]}

    async with live({"noting": Plain(note)}) as server:
        kserve = KServe(server.server.dataplane, "here", Telemetry())
        requests = Bursts([asking("noting", at) for at in range(3)], [asking("noting", at) for at in range(3, 6)])
        sink = Collected()
        conversation = kserve.converse(requests, Call(), sink)
        conversation.receive()
        requests.arrive()
        conversation.receive()
        await sink.has_ended.wait()
    values = [value(pb.ModelStreamInferResponse.FromString(response)) for response in sink.responses]
    assert values == began == list(range(6))


@pytest.mark.parametrize("transport", ["h2", "aio"])
async def test_decoupled_models_among_others_give_all_their_answers(transport: str) -> None:
    asked = [("apart", 40), ("async", 1), ("thread", 2), ("apart", 0), ("async", 3), ("apart", 100)] * 5
    async with live(kinds(), grpc_transport=transport) as server:
        call = server.stream_infer(
            sending(*(asking(name, number, f"{name} {at}") for at, (name, number) in enumerate(asked))), timeout=60
        )
        found = [response async for response in call]
    in_order = [response for response in found if not response.infer_response.id.startswith("apart")]
    assert [value(response) for response in in_order] == [2, 4, 6] * 5
    for at, (name, number) in enumerate(asked):
        if name == "apart":
            own = [value(response) for response in found if response.infer_response.id == f"apart {at}"]
            assert own == list(range(number))


@pytest.mark.parametrize("execution", ["async", "thread"])
async def test_requests_that_come_one_after_the_other_wait_while_no_answer_can_leave(execution: str) -> None:
    began = 0

    def note(inputs: Inputs) -> dict[str, Any]:
        nonlocal began
        began += 1
        return {"y": inputs["x"]}

    async def note_later(inputs: Inputs) -> dict[str, Any]:
        return note(inputs)

    noting = Plain(note_later if execution == "async" else note)
    wanted = 200
    async with live({"noting": noting}, grpc_transport="h2", max_unread_bytes=4000) as server:
        client = await opened(server, window=0)
        for at in range(wanted):
            await client.send(data(1, message(asking("noting", at)), end=False))
            await client.wait_until_processed()
        # What was answered before any other is on its way, in one frame; each of the others takes over 100 bytes.
        await until(lambda: began > 20)
        assert began <= 2 * MAX_IN_A_ROW
        await client.send(frames.window_update(1, 2**20), data(1, b""))
        found, _ = await answers_of(client)
        await client.close()
    assert [value(response) for response in found] == list(range(wanted))


async def test_after_an_error_that_ends_the_call_nothing_runs() -> None:
    began = 0

    async def note(inputs: Inputs) -> dict[str, Any]:
        nonlocal began
        began += 1
        return {"y": inputs["x"]}

    async with live({"noting": Plain(note)}, grpc_transport="h2") as server:
        client = await opened(server, window=0)
        good, bad = message(asking("noting", 1)), message(b"not gzip", packed=1)
        for sent in (good, good, good, bad, good, good):
            await client.send(data(1, sent, end=False))
            await client.wait_until_processed()
        await client.send(frames.window_update(1, 2**20))
        assert (await client.status(1))["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])
        await client.close()
    assert began == 3


async def test_thousands_of_wrong_requests_behind_those_that_run() -> None:
    gate = asyncio.Event()
    running = 0

    async def wait(inputs: Inputs) -> dict[str, Any]:
        nonlocal running
        running += 1
        await gate.wait()
        return {"y": inputs["x"]}

    async with live({"waits": Plain(wait)}, grpc_transport="h2") as server:
        client = await opened(server)
        await client.send(*(data(1, message(asking("waits")), end=False) for _ in range(MAX_IN_A_ROW)))
        await until(lambda: running == MAX_IN_A_ROW)
        await client.send(data(1, message(b"", packed=1) * 3000, end=False))
        await client.wait_until_processed()
        gate.set()
        assert (await client.status(1))["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])
        await client.close()
        await until(lambda: server.leases() == 0)


async def test_a_model_that_never_waits_lets_others_have_their_turn() -> None:
    made = 0

    async def endless(inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        nonlocal made
        while True:
            made += 1
            yield y(made)

    async with live({"endless": Plain(endless), "async": Plain(twice_later)}, grpc_transport="h2") as server:
        client = await opened(server)
        await client.send(data(1, message(asking("endless")), end=False))
        got = await client.next(frames.DATA)
        # Its window is full some time, and what then waits is bounded.
        other = server.stream_infer(sending(asking("async", 4)), timeout=30)
        assert [value(response) async for response in other] == [8]
        assert made <= (2**20 + len(got.payload)) / 50 + MAX_UNSENT + STREAM_BUFFER
        await client.close()
        await until(lambda: server.leases() == 0)


@pytest.mark.parametrize("transport", ["h2", "aio"])
async def test_compressed_requests_are_answered_in_order(transport: str) -> None:
    async with live(kinds(), grpc_transport=transport) as server:
        call = server.stream_infer(
            sending(*(asking("async", at) for at in range(100))), timeout=60, compression=grpc.Compression.Gzip
        )
        assert [value(response) async for response in call] == [2 * at for at in range(100)]


async def test_a_request_that_cannot_be_inflated_ends_the_call_after_the_answers_before_it() -> None:
    async with live(kinds(), grpc_transport="h2") as server:
        client = await opened(server)
        first, second = message(asking("async", 1)), message(b"not gzip", packed=1)
        await client.send(data(1, first, end=False))
        answer = await client.next(frames.DATA)
        assert value(pb.ModelStreamInferResponse.FromString(answer.payload[5:])) == 2
        await client.send(data(1, second, end=False))
        fields = client.fields((await client.next(frames.HEADERS)).payload)
        assert fields["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])
        assert "grpc-encoding names no algorithm" in fields["grpc-message"]
        await client.close()
