"""Answers that are kept for equal requests, over every interface (spec 5.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.protocol_clients.every_protocol import (
    INTERFACES,
    MODEL,
    UNARY,
    Interface,
    kserve_grpc,
    kserve_rest,
    kserve_stream,
)
from tests.scheduling.scripted_models import Scripted
from tests.transports.live import Live, live
from tests.waiting import until
from triglot import Call, InvalidArgument, Model, TensorSpec
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.core.tensor import Array

MIB = 1 << 20
PARAMETERS = pytest.mark.parametrize("interface", [kserve_grpc, kserve_rest, kserve_stream])


class Doubling(Model):
    """Doubles, and remembers what it was asked for; its answers may be kept."""

    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]
    response_cache = True

    def __init__(self) -> None:
        self.asked: list[float] = []

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Any]:
        self.asked.append(float(inputs["x"][0]))
        if inputs["x"][0] < 0:
            raise InvalidArgument("below zero")
        return {"y": inputs["x"] * 2}


def readings(server: Live) -> dict[str, float]:
    """What the cache counts of the only version."""
    (version,) = server.server.manager.registry.versions()
    assert version.servable is not None
    values = {reading.name: reading.value for reading in version.servable.readings()}
    return {name.removeprefix("response_cache_"): values[name] for name in values if "cache" in name}


@pytest.mark.parametrize("interface", UNARY.values(), ids=UNARY)
async def test_an_equal_request_gets_the_answer_of_the_first(interface: Interface) -> None:
    model = Doubling()
    async with live({MODEL: model}, response_cache_bytes=MIB) as server:
        for value in (1, 2, 1, 2, 1):
            assert (await interface(server, value)).value == 2 * value
        assert model.asked == [1, 2]
        values = readings(server)
        assert (values["hits"], values["misses"], values["evictions"]) == (3, 2, 0)
        assert 0 < values["bytes"] <= MIB


async def test_all_interfaces_share_the_cache() -> None:
    model = Doubling()
    interfaces = [kserve_grpc, kserve_rest, kserve_stream, INTERFACES["grps gRPC"], INTERFACES["grps HTTP"]]
    async with live({MODEL: model}, response_cache_bytes=MIB) as server:
        for interface in interfaces:
            assert (await interface(server, 3)).value == 6
        # TensorFlow Serving's rules for shapes are others.
        for name in ("TF Serving gRPC", "TF Serving REST", "AI Platform"):
            assert (await INTERFACES[name](server, 3)).value == 6
        assert model.asked == [3, 3]


@pytest.mark.parametrize("options", [{}, {"response_cache_bytes": MIB}])
async def test_nothing_is_kept_unless_server_and_model_say_so(options: dict[str, Any]) -> None:
    model = Doubling()
    model.response_cache = not options
    async with live({MODEL: model}, **options) as server:
        for _ in range(2):
            await kserve_grpc(server, 1)
        assert model.asked == [1, 1]
        assert readings(server) == {}


@PARAMETERS
async def test_parameters_are_part_of_a_request(interface: Interface) -> None:
    model = Doubling()
    async with live({MODEL: model}, response_cache_bytes=MIB) as server:
        for parameters in ({}, {"seed": 1}, {"seed": 2}, {"seed": 1}, {"priority": 1}, {"timeout": 10**9}):
            await interface(server, 1, parameters=parameters)
        # When it is executed is none of the model's business.
        assert len(model.asked) == 3


@pytest.mark.parametrize("interface", UNARY.values(), ids=UNARY)
async def test_errors_are_not_kept(interface: Interface) -> None:
    model = Doubling()
    async with live({MODEL: model}, response_cache_bytes=MIB) as server:
        for _ in range(2):
            try:
                assert (await interface(server, -1)).code is not Code.OK
            except KeyError:
                pass  # grps tells it as 500, like any error of a model's.
        assert model.asked == [-1, -1]
        assert readings(server)["bytes"] == 0


async def test_a_kept_answer_takes_no_place_in_the_queue() -> None:
    class Gated(Scripted):
        response_cache = True

    model = Gated()
    async with live({MODEL: model}, response_cache_bytes=MIB, max_queue_size=1) as server:
        assert (await kserve_grpc(server, 1)).value == 2
        model.close_point("infer")
        held = [asyncio.ensure_future(kserve_grpc(server, 2))]
        await model.until_at("infer", 2)
        held.append(asyncio.ensure_future(kserve_grpc(server, 3)))
        await until(lambda: server.server.dataplane.queue_depth() == 1)
        assert (await kserve_grpc(server, 4)).code is Code.RESOURCE_EXHAUSTED
        assert (await kserve_grpc(server, 1)).value == 2
        model.open_point("infer")
        assert [answer.value for answer in await asyncio.gather(*held)] == [4, 6]


async def test_a_kept_answer_is_a_request_and_no_execution() -> None:
    async with live({MODEL: Doubling()}, response_cache_bytes=MIB) as server:
        for _ in range(3):
            await kserve_grpc(server, 1)
        text = await (await server.session.get(server.url.removesuffix("/v2") + "/metrics")).text()
        lines = [line for line in text.splitlines() if f'model="{MODEL}"' in line]

        def values(name: str) -> list[float]:
            return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]

        assert values("triglot_requests_total") == [3]
        assert values("triglot_executions_total") == [1]
        assert values("triglot_response_cache_hits_total") == [2]
        assert values("triglot_response_cache_misses_total") == [1]


async def test_a_version_that_is_loaded_again_has_answers_of_its_own() -> None:
    models: list[Doubling] = []

    class Listed(Doubling):
        def __init__(self) -> None:
            super().__init__()
            models.append(self)

    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": MODEL}
    async with live({MODEL: Listed}, response_cache_bytes=MIB, **options) as server:
        for _ in range(2):
            await kserve_grpc(server, 1)
        await server.server.dataplane.unload_model(EVERYTHING, MODEL)
        await server.server.dataplane.load_model(EVERYTHING, MODEL)
        for _ in range(2):
            await kserve_grpc(server, 1)
        assert [model.asked for model in models] == [[1], [1]]
        values = readings(server)
        assert (values["hits"], values["misses"]) == (1, 1)


async def test_equal_requests_at_the_same_time_are_each_executed() -> None:
    class Gated(Scripted):
        response_cache = True

    model = Gated(open_gate=False)
    async with live({MODEL: model}, response_cache_bytes=MIB) as server:
        calls = [asyncio.ensure_future(kserve_grpc(server, 1)) for _ in range(2)]
        await until(lambda: server.leases() == 2)
        await model.until_at("infer")
        calls[0].cancel()
        model.open_point("infer")
        assert (await calls[1]).value == 2
        assert (await kserve_grpc(server, 1)).value == 2
        assert readings(server)["hits"] == 1
