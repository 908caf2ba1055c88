"""The benches of scheduling, as short as they can be: that they run and count right, not what they measure."""

import asyncio
from itertools import count

import grpc
import pytest

from bench import affine, batching, engine, openclient, overload, rounds
from bench.affine import Batching
from bench.tally import BenchError, close
from bench.test_clients import PATH, Context, grpc_server
from triglot.model.scheduling import DynamicBatching
from triglot.scheduling.servable import Servable


async def _offer(port: int, reply: bytes, patience: float = 10.0) -> openclient.Offered:
    connection = await openclient.connect(port, PATH, b"x" * 100, reply)
    try:
        return await openclient.offer(connection, 500.0, 0.2, patience)
    finally:
        await close(connection)


async def test_open_loop_separates_answers_from_refusals() -> None:
    numbers = count(1)

    async def handler(request: bytes, context: Context) -> bytes:
        if next(numbers) % 3 == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return request

    async with grpc_server(handler) as port:
        offered = await _offer(port, b"x" * 100)
    came = next(numbers) - 1
    assert len(offered.refused) == came // 3 > 0
    assert len(offered.good) == came - came // 3
    assert 0 < min(offered.good + offered.refused) < offered.seconds


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    arrived = asyncio.Semaphore(0)
    answer = asyncio.Event()

    async def handler(request: bytes, context: Context) -> bytes:
        arrived.release()
        await answer.wait()
        return request

    async with grpc_server(handler) as port:
        offering = asyncio.ensure_future(_offer(port, b"x" * 100))
        for _ in range(20):
            await arrived.acquire()
        answer.set()
        assert len((await offering).good) >= 20


async def test_an_open_loop_refuses_another_reply() -> None:
    async def handler(request: bytes, context: Context) -> bytes:
        return request + b"!"

    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match="106 bytes in place of 105"):
            await _offer(port, b"x" * 100)


async def test_an_open_loop_misses_answers() -> None:
    async def handler(request: bytes, context: Context) -> bytes:
        await asyncio.Event().wait()
        return request

    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match="calls without an answer"):
            await _offer(port, b"x" * 100, patience=0.1)


@pytest.mark.parametrize(
    ("batching", "wanted"),
    [
        (Batching("none", on=False), None),
        (Batching("by hand", delay=0.002, sizes=(8,)), DynamicBatching((8,), 0.002)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_served_and_run_alike(batching: Batching, wanted: DynamicBatching | None) -> None:
    assert affine.model(batching).dynamic_batching == wanted
    namespace: dict[str, object] = {}
    text = affine.MODEL.format(fixed=1, per_row=2, max_batch_size=3, max_queue_size=4, batching=batching.source())
    exec(text, namespace)
    model = namespace["Model"]
    assert isinstance(model, type)
    assert issubclass(model, affine.Affine)
    assert model.dynamic_batching == wanted


PLAN = rounds.Plan(rounds=1, seconds=0.05)


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("over", ["grpc", "engine"])
def test_batching(in_flight: int, over: str) -> None:
    measured = batching.over_grpc(in_flight, PLAN, None) if over == "grpc" else batching.on_engine(in_flight, PLAN)
    assert [measurement.setting for measurement in measured] == batching.settings(in_flight)
    assert all(measurement.rounds[0].rate > 0 for measurement in measured)
    printed = "\n".join(batching.lines(measured))
    assert printed.count("goal") == 1


async def test_a_round_on_the_engine_has_an_answer_however_short_it_is() -> None:
    servable = Servable("m", 1, affine.model(batching.UNBATCHED), max_queue_size=3)
    try:
        measured = await engine.load(servable, 4, in_flight=3, seconds=0)
    finally:
        await servable.close()
    assert measured.rate > 0
    assert 0 < measured.p50 <= measured.p99


def test_overload() -> None:
    plan = overload.parse(["--seconds", "1"])
    result = overload.measure(plan, None)
    assert result.codes["OK"] == len(result.outcome.good) > 0
    assert result.codes["RESOURCE_EXHAUSTED"] == len(result.outcome.refused) > 0
    assert set(+result.codes) == {"OK", "RESOURCE_EXHAUSTED"}
    assert all(result.probes.values())
    assert len(result.resident) == overload.SAMPLES
    assert sum("goal" in line for line in overload.lines(result)) == 5


def test_a_model_that_holds_the_interpreter() -> None:
    held = overload.hold(overload.parse(["--seconds", "1", "--queue", "8"]), None)
    assert len(held.latencies) > 8 + overload.INSTANCES
    assert {name for name, latencies in held.probes.items() if latencies} == {
        "gRPC health",
        "gRPC model metadata",
        "REST readiness",
    }
    assert sum("goal p99 50 ms" in line for line in overload.held_lines(held)) == 3


async def test_a_silent_port_is_an_error() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        with pytest.raises(BenchError, match="closed the connection"):
            await openclient.connect(server.sockets[0].getsockname()[1], PATH, b"", b"")
