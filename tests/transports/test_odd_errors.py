"""Errors of a model's own making, alone and in a batch: every call is answered, and the model continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from live import Live, live, request

import triglot
from triglot.core.errors import Code
from triglot.core.tensor import Array

pytestmark = pytest.mark.both_transports

SECONDS = 20.0
FLOAT = b"\0\0\x80\x3f"


class AsksForTwo(triglot.ServingError):
    code = Code.FAILED_PRECONDITION

    def __new__(cls, _: str, __: str) -> AsksForTwo:
        return super().__new__(cls)

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class WithoutText(triglot.ServingError):
    def __init__(self) -> None:
        Exception.__init__(self)


class Undescribed(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class FailingText(triglot.ServingError):
    message = property(lambda self: self.args[1])

    def __init__(self) -> None:
        Exception.__init__(self)


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


def hinting(hint: Any) -> triglot.ServingError:
    error = triglot.FailedPrecondition("odd")
    error.retry_after = hint
    return error


def without_failure(code: Any) -> triglot.ServingError:
    return triglot.ServingError("odd", code=code)


ALWAYS_THE_SAME = triglot.FailedPrecondition("always the same")
ODD: dict[str, tuple[BaseException, grpc.StatusCode]] = {
    "its own __new__": (AsksForTwo("two", "words"), grpc.StatusCode.FAILED_PRECONDITION),
    "no text": (WithoutText(), grpc.StatusCode.INTERNAL),
    "the code OK": (without_failure(Code.OK), grpc.StatusCode.INTERNAL),
    "no code": (without_failure(99), grpc.StatusCode.INTERNAL),
    "no description": (Undescribed(), grpc.StatusCode.INTERNAL),
    "a text that fails": (FailingText(), grpc.StatusCode.INTERNAL),
    "frozen": (Frozen("frozen"), grpc.StatusCode.INTERNAL),
    "a hint that is none": (hinting("soon"), grpc.StatusCode.INTERNAL),
    "a hint without end": (hinting(float("inf")), grpc.StatusCode.INTERNAL),
    "exit": (SystemExit(3), grpc.StatusCode.INTERNAL),
    "cancellation": (asyncio.CancelledError(), grpc.StatusCode.INTERNAL),
    "one for all": (ALWAYS_THE_SAME, grpc.StatusCode.FAILED_PRECONDITION),
}


class Raises(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    max_batch_size = 8

    def __init__(self, error: BaseException, batching: triglot.DynamicBatching | None = None) -> None:
        self.error: BaseException | None = error
        self.dynamic_batching = batching

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self.error is not None:
            raise self.error
        return {"y": inputs["x"]}


class RaisesOnLoop(Raises):
    async def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:  # type: ignore[override] # Another kind.
        return super().infer(inputs)


class Streams(Raises):
    def infer(self, inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:  # type: ignore[override]
        yield super().infer(inputs)


class StreamsOnLoop(Raises):
    async def infer(  # type: ignore[override]
        self, inputs: Mapping[str, Array]
    ) -> AsyncIterator[dict[str, Array]]:
        yield super().infer(inputs)


class Asks(triglot.Ensemble):
    inputs = Raises.inputs
    outputs = Raises.outputs
    steps = [triglot.Step("m", inputs={"x": "x"}, outputs={"y": "y"})]


async def failure(server: Live, model: str = "m") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(server.infer(request(model, FLOAT, shape=(1,))), SECONDS)
    return raised.value


@pytest.mark.parametrize("kind", [Raises, RaisesOnLoop])
@pytest.mark.parametrize("batching", [None, triglot.DynamicBatching(preferred_sizes=[2], max_queue_delay=SECONDS)])
@pytest.mark.parametrize("case", ODD)
async def test_an_odd_error_fails_its_calls_and_nothing_else(
    kind: type[Raises], batching: triglot.DynamicBatching | None, case: str
) -> None:
    error, code = ODD[case]
    model = kind(error, batching)
    async with live({"m": model}) as server:
        # With batching these two make a batch.
        failures = await asyncio.gather(failure(server), failure(server))
        assert [failure.code() for failure in failures] == [code, code]
        model.error = None
        await asyncio.gather(*[server.infer(request("m", FLOAT, shape=(1,))) for _ in range(2)])
        assert server.leases() == 0


@pytest.mark.parametrize("kind", [Raises, RaisesOnLoop, Streams, StreamsOnLoop])
@pytest.mark.parametrize("case", ODD)
async def test_an_odd_error_ends_its_part_of_a_stream(kind: type[Raises], case: str) -> None:
    model = kind(ODD[case][0])
    async with live({"m": model}) as server:
        call = server.stream_infer(iter([request("m", FLOAT, shape=(1,))]))
        answers = await asyncio.wait_for(all_of(call), SECONDS)
        assert [bool(answer.error_message) for answer in answers] == [True]
        model.error = None
        answers = await all_of(server.stream_infer(iter([request("m", FLOAT, shape=(1,))])))
        assert [answer.error_message for answer in answers] == [""]
        assert server.leases() == 0


async def all_of(call: Any) -> list[Any]:
    return [answer async for answer in call]


async def test_an_error_that_is_raised_again_says_the_same_each_time() -> None:
    async with live({"m": Raises(ALWAYS_THE_SAME), "asks": Asks()}) as server:
        texts = {(await failure(server, "asks")).details() for _ in range(3)}
        assert texts == {"in ensemble 'asks', model 'm': always the same"}
        assert (await failure(server)).details() == "always the same"
