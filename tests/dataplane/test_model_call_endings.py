"""Calls of models that end early, and those that would never end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

import triglot
from tests.served_models import (
    SECONDS,
    Arrays,
    Function,
    Gated,
    both,
    calling,
    ensemble,
    ints,
    serving,
    step,
    twice,
)
from tests.waiting import ever_later, until
from triglot.core.call import MAX_MODEL_CALLS, BatchCall, Call
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb


@both
@pytest.mark.parametrize("place", ["running", "queued"])
async def test_the_caller_leaves(on_loop: bool, place: str) -> None:
    """The called model sees it, or is never asked; the calling thread is free again at once."""
    gated, begun, left = Gated(), threading.Event(), threading.Event()

    def outer(inputs: Arrays, call: Call) -> Any:
        begun.set()
        try:
            return call.infer("gated", inputs)
        finally:
            left.set()

    async def async_outer(inputs: Arrays, call: Call) -> Any:
        begun.set()
        try:
            return await call.infer("gated", inputs)
        finally:
            left.set()

    async with serving({"gated": gated, "outer": Function(async_outer if on_loop else outer)}) as served:
        busy = asyncio.create_task(served.infer("gated", ints(1))) if place == "queued" else None
        if busy is not None:
            await gated.until_at("infer")
        asked = asyncio.create_task(served.infer("outer", ints(2)))
        if busy is None:
            await gated.until_at("infer")
        else:
            # It waits for its own instance first.
            await until(lambda: begun.is_set() and served.server.dataplane.queue_depth() == 1)
        asked.cancel()
        await until(left.is_set)
        await asyncio.wait([asked])
        assert asked.cancelled()
        if busy is None:
            assert gated.calls[0].cancelled
        else:
            assert served.server.dataplane.queue_depth() == 0
        gated.open_point("infer")
        if busy is not None:
            assert (await busy).tolist() == [1]
        await served.is_idle()
        assert (await served.infer("outer", ints(3))).tolist() == [3]
        assert len(gated.calls) == 2


@both
async def test_the_deadline_passes(on_loop: bool) -> None:
    gated, seen = Gated(), list[BaseException]()

    def outer(inputs: Arrays, call: Call) -> Any:
        try:
            return call.infer("gated", inputs)
        except BaseException as error:
            seen.append(error)
            raise

    models = {"gated": gated, "outer": calling("gated", on_loop=True) if on_loop else Function(outer)}
    async with serving(models) as served:
        for later in ever_later(0.1):
            error = await served.error("outer", ints(1), Call(time.monotonic() + later))
            assert error.code is Code.DEADLINE_EXCEEDED
            if gated.calls:
                break
        if not on_loop:
            await until(lambda: seen)
            assert isinstance(seen[0], triglot.DeadlineExceeded)
        gated.open_point("infer")
        await served.is_idle()
        assert (await served.infer("outer", ints(3))).tolist() == [3]


async def test_a_batch_is_left_when_all_of_its_members_are() -> None:
    """A call that is made on behalf of several continues as long as one of them waits."""
    gated, members = Gated(), [Call(), Call()]

    async with serving({"gated": gated}) as served:
        for member in members:
            member.reach = served.server.dataplane.reach
        asked = BatchCall(members).infer("gated", {"x": ints(1)})
        await gated.until_at("infer")
        members[0].cancel()
        assert not asked.cancelling()
        members[1].cancel()
        with pytest.raises(triglot.Cancelled, match=r"request.* was cancelled"):
            await asked
        assert gated.calls[0].cancelled
        gated.open_point("infer")
        await served.is_idle()


# --- calls that go round ---


async def test_a_model_that_calls_itself_on_the_loop() -> None:
    async def count_down(inputs: Arrays, call: Call) -> Any:
        left = inputs["x"] - 1
        return {"y": left} if left[0] <= 0 else await call.infer("count", {"x": left})

    async with serving({"count": Function(count_down)}) as served:
        assert (await served.infer("count", ints(MAX_MODEL_CALLS + 1))).tolist() == [0]
        error = await served.error("count", ints(MAX_MODEL_CALLS + 2))
        assert error.code is Code.FAILED_PRECONDITION
        assert f"nested more than {MAX_MODEL_CALLS} deep: count -> count" in error.message
        await served.is_idle()


# --- calls without number ---


@pytest.mark.parametrize("transport", ["h2", "aio"])
async def test_a_diamond_of_ensembles(transport: str) -> None:
    """Each of six levels calls the one below twice: 126 calls on behalf of one request."""
    levels: dict[str, triglot.Model] = {"level_0": Function(twice)}
    for number in range(1, 7):
        below = f"level_{number - 1}"
        levels[f"level_{number}"] = ensemble(step(below, "x", "a"), step(below, "a", "y"))
    async with (
        serving(levels, grpc_transport=transport, max_inner_calls=100) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def call(level: int) -> None:
            request = pb.ModelInferRequest(model_name=f"level_{level}", raw_input_contents=[bytes(4)])
            request.inputs.add(name="x", datatype="INT32", shape=[1])
            await infer(request.SerializeToString(), timeout=SECONDS)

        await call(5)
        with pytest.raises(grpc.aio.AioRpcError, match="more than 100 calls") as caught:
            await call(6)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "the most that max_inner_calls allows: level_6 -> level_5" in str(caught.value.details())
        await call(5)
        await served.is_idle()


BATCHED: dict[str, Any] = {"max_batch_size": 8, "dynamic_batching": triglot.DynamicBatching()}


def on_thread(inputs: Arrays, call: Call) -> Any:
    left = inputs["x"] - 1
    return {"y": left} if left[0] <= 0 else call.infer("count", {"x": left})


async def on_loop(inputs: Arrays, call: Call) -> Any:
    left = inputs["x"] - 1
    return {"y": left} if left[0] <= 0 else await call.infer("count", {"x": left})


COUNTS = {"thread": (on_thread, {}), "thread, batched": (on_thread, BATCHED), "loop, batched": (on_loop, BATCHED)}


@pytest.mark.parametrize(("count_down", "options"), COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("instances", [1, 3])
async def test_a_model_that_waits_for_itself(instances: int, count_down: Any, options: dict[str, Any]) -> None:
    """A call that needs an instance, or a batch's turn, while all of them wait for it would never end."""
    async with serving({"count": Function(count_down, instances=instances, **options)}) as served:
        assert (await served.infer("count", ints(instances))).tolist() == [0]
        error = await served.error("count", ints(instances + 1))
        assert error.code is Code.FAILED_PRECONDITION
        assert f"the call would deadlock: count -> count{' -> count' * (instances - 1)}, and" in error.message
        await served.is_idle()
        assert (await served.infer("count", ints(instances))).tolist() == [0]


async def test_a_sequence_that_waits_for_itself() -> None:
    """However many instances there are: its requests run one after the other."""
    sequences = triglot.SequenceBatching(max_idle=3600)
    parameters = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    async with serving({"count": Function(on_thread, instances=2, sequence_batching=sequences)}) as served:
        error = await served.error("count", ints(2), parameters=dict(parameters))
        assert error.code is Code.FAILED_PRECONDITION
        assert "the call could deadlock on its own sequence: count -> count" in error.message
        await served.is_idle()
        assert (await served.infer("count", ints(1), parameters=dict(parameters))).tolist() == [0]


async def test_two_models_that_wait_for_each_other() -> None:
    def ask(other: str) -> Function:
        return Function(lambda inputs, call: call.infer(other, inputs))

    async with serving({"one": ask("two"), "two": ask("one")}) as served:
        error = await served.error("one", ints(1))
        assert error.code is Code.FAILED_PRECONDITION
        assert "one -> two -> one, and every instance of 'one' (1) waits" in error.message
        await served.is_idle()


async def test_two_calls_that_wait_for_the_same_instances() -> None:
    """Both are held up by the other: one of them is refused, and may retry."""
    together = threading.Barrier(2)

    def outer(inputs: Arrays, call: Call) -> Any:
        if inputs["x"][0] == 0:
            return {"y": inputs["x"]}
        together.wait(SECONDS)
        return call.infer("outer", {"x": ints(0)})

    async with serving({"outer": Function(outer, instances=2)}) as served:
        async with asyncio.timeout(SECONDS):
            answers = await asyncio.gather(
                *[served.infer("outer", ints(1)) for _ in range(2)], return_exceptions=True
            )
        (refused,) = [answer for answer in answers if isinstance(answer, triglot.ServingError)]
        assert refused.code is Code.RESOURCE_EXHAUSTED
        assert refused.retry_after
        (answer,) = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert answer.tolist() == [0]
        await served.is_idle()
