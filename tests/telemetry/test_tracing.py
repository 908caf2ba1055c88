"""Traces of single requests: which are traced, and what is written of them (spec 3.11)."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import triglot
from tests.served_models import Arrays, Function, Gated, both, calling, ensemble, step, twice
from tests.traced_models import ALL_STAMPS, Traces, one_model, served
from tests.waiting import until
from triglot.telemetry.trace_tensors import MAX_ELEMENTS
from triglot.telemetry.tracing import MAX_STEPS

# --- what is told ---


@both
async def test_a_request(tmp_path: Path, on_loop: bool) -> None:
    gated = threading.Event()

    async def infer_on_loop(inputs: Arrays) -> Any:
        await asyncio.sleep(0.002)  # Its work, which is told.
        return {"y": inputs["x"]}

    def infer(inputs: Arrays) -> Any:
        gated.wait(0.002)
        return {"y": inputs["x"]}

    async with served(tmp_path / "t", {"slow": Function(infer_on_loop if on_loop else infer)}) as client:
        await client.infer("slow", 1, id="seven")
        await client.infer("slow", 2)
    traces = Traces(tmp_path / "t")
    assert traces.heads == [
        {"id": 1, "model_name": "slow", "model_version": 1, "request_id": "seven"},
        {"id": 2, "model_name": "slow", "model_version": 1},
    ]
    for number in (1, 2):
        assert traces.names(number) == ALL_STAMPS
        moments = [stamp["ns"] for stamp in traces.stamps(number)]
        assert moments == sorted(moments)
        at = dict(zip(ALL_STAMPS, moments, strict=True))
        assert at["COMPUTE_OUTPUT_START"] - at["COMPUTE_INPUT_END"] >= 2_000_000


async def test_requests_of_every_protocol(tmp_path: Path) -> None:
    async with served(tmp_path / "t", one_model(), default_model="twice") as client:
        await client.infer("twice", 1)
        assert await client.stream("twice", 1) == 1
        for path, body in (
            ("/v1/models/twice:predict", {"inputs": [1]}),
            (
                "/grps/v1/infer/predict",
                {"gtensors": {"tensors": [{"name": "x", "dtype": "DT_INT32", "shape": [1], "flat_int32": [1]}]}},
            ),
            ("/v2/models/twice/generate", {"x": 1}),
        ):
            assert (await client.post(path, body))[0] == 200, path
    assert Traces(tmp_path / "t").models == ["twice"] * 5


async def test_what_a_batch_waits_for(tmp_path: Path) -> None:
    model = Gated()
    model.dynamic_batching = triglot.DynamicBatching()
    model.max_batch_size = 4
    async with served(tmp_path / "t", {"gated": model}) as client:
        first = asyncio.create_task(client.infer("gated", 1))
        await model.until_at("infer")
        others = [asyncio.create_task(client.infer("gated", 1)) for _ in range(2)]
        await until(lambda: client.server.dataplane.queue_depth() == 2)
        model.open_point("infer")
        await asyncio.gather(first, *others)
    traces = Traces(tmp_path / "t")
    assert [call.members for call in model.calls][1:] != []
    assert all(traces.names(number) == ALL_STAMPS for number in (1, 2, 3))
    at = [{stamp["name"]: stamp["ns"] for stamp in traces.stamps(number)} for number in (1, 2, 3)]
    # The next batch may begin while the loop still makes answers of the first one's outputs.
    assert all(stamps["COMPUTE_START"] >= at[0]["COMPUTE_OUTPUT_START"] for stamps in at[1:])
    assert all(stamps["QUEUE_START"] < at[0]["COMPUTE_END"] for stamps in at[1:])


async def test_requests_that_fail(tmp_path: Path) -> None:
    def fails(_: Arrays) -> Any:
        raise triglot.InvalidArgument("no")

    async with served(tmp_path / "t", {"fails": Function(fails)}) as client:
        await client.infer("fails", 1, status=400)
        tensor = {"name": "z", "datatype": "INT32", "shape": [1], "data": [1]}
        assert (await client.post("/v2/models/fails/infer", {"inputs": [tensor]}))[0] == 400
        await client.infer("nope", 1, status=404)
        assert (await client.post("/v2/models/fails/infer", {"inputs": 7}))[0] == 400
    traces = Traces(tmp_path / "t")
    assert traces.models == ["fails", "fails"]
    assert traces.names(1) == ALL_STAMPS
    assert traces.names(2) == ["REQUEST_START", "REQUEST_END"], "no model has begun with it"


async def test_a_client_that_leaves(tmp_path: Path) -> None:
    model = Gated()
    async with served(tmp_path / "t", {"gated": model}) as client:
        asking = asyncio.create_task(client.infer("gated", 1))
        await model.until_at("infer")
        asking.cancel()
        await until(lambda: not any(endpoint.in_flight for endpoint in client.server.telemetry.endpoints()))
        model.open_point("infer")
    traces = Traces(tmp_path / "t")
    assert traces.names(1) == ALL_STAMPS


async def test_the_answers_of_a_stream(tmp_path: Path) -> None:
    def counts(inputs: Arrays) -> Any:
        for number in range(int(inputs["x"][0])):
            yield {"y": inputs["x"] + number}

    options = {"trace_level": "TIMESTAMPS,TENSORS"}
    async with served(tmp_path / "t", {"counts": Function(counts)}, **options) as client:
        assert await client.stream("counts", 3) == 3
    traces = Traces(tmp_path / "t")
    assert traces.names(1).count("INFER_RESPONSE_COMPLETE") == 3
    assert (traces.names(1)[0], traces.names(1)[-1]) == ("REQUEST_START", "REQUEST_END")
    answers = [tensor["data"] for activity, tensor in traces.tensors(1) if activity == "TENSOR_BACKEND_OUTPUT"]
    assert answers == ["3", "4", "5"]


async def test_tensors(tmp_path: Path) -> None:
    async with served(tmp_path / "t", one_model(), trace_level="TENSORS") as client:
        await client.infer("twice", 1, 2, 3)
        await client.stream("twice", *range(2000))
    traces = Traces(tmp_path / "t")
    small = {"name": "x", "data": "1,2,3", "shape": "3", "dtype": "INT32"}
    assert traces.tensors(1) == [
        ("TENSOR_QUEUE_INPUT", small),
        ("TENSOR_BACKEND_OUTPUT", small | {"name": "y", "data": "2,4,6"}),
    ]
    (_, asked), (_, answer) = traces.tensors(2)
    assert asked["data"] == ",".join([*map(str, range(MAX_ELEMENTS)), "..."])
    assert answer["data"].startswith("0,2,4,")
    assert asked["shape"] == answer["shape"] == "2000"
    assert not any("timestamps" in event for event in json.loads((tmp_path / "t").read_text()))


# --- models that call models ---


@both
async def test_calls_of_models_have_parents(tmp_path: Path, on_loop: bool) -> None:
    models = {
        "twice": Function(twice),
        "outer": calling("twice", on_loop=on_loop),
        "outermost": calling("outer", on_loop=on_loop),
    }
    async with served(tmp_path / "t", models, trace_rate=2) as client:
        for _ in range(4):
            await client.infer("outermost", 1)
    traces = Traces(tmp_path / "t")
    assert sorted(traces.models) == sorted(["outermost", "outer", "twice"] * 2), "every other request"
    by_id = {head["id"]: head for head in traces.heads}
    for head in traces.heads:
        parent = by_id[head["parent_id"]]["model_name"] if "parent_id" in head else None
        assert parent == {"twice": "outer", "outer": "outermost", "outermost": None}[head["model_name"]]
        assert traces.names(head["id"]) == ALL_STAMPS


async def test_calls_of_a_trace_are_limited(tmp_path: Path) -> None:
    async def many(inputs: Arrays, call: triglot.Call) -> Any:
        answers = await asyncio.gather(*(call.infer("twice", {"x": inputs["x"]}) for _ in range(MAX_STEPS + 10)))
        return {"y": answers[-1]["y"]}

    models = {"twice": Function(twice), "outer": Function(many)}
    async with served(tmp_path / "t", models) as client:
        await client.infer("outer", 1)
    assert Traces(tmp_path / "t").models.count("twice") == MAX_STEPS


async def test_steps_of_ensembles_have_parents(tmp_path: Path) -> None:
    steps = ensemble(step("twice", "x", "z"), step("twice", "z", "y"))
    async with served(tmp_path / "t", {"twice": Function(twice), "steps": steps}) as client:
        await client.infer("steps", 1)
    heads = Traces(tmp_path / "t").heads
    assert [(head["model_name"], head.get("parent_id")) for head in heads] == [
        ("steps", None),
        ("twice", 1),
        ("twice", 1),
    ]


# --- which requests ---


async def test_one_of_some(tmp_path: Path) -> None:
    async with served(tmp_path / "t", one_model(), trace_rate=3) as client:
        for number in range(8):
            await client.infer("twice", 1, id=str(number + 1))
    assert [head["request_id"] for head in Traces(tmp_path / "t").heads] == ["3", "6"]


async def test_as_many_as_are_counted(tmp_path: Path) -> None:
    async with served(tmp_path / "t", one_model(), trace_count=2) as client:
        for left in ("1", "0", "0"):
            await client.infer("twice", 1)
            assert (await client.set())["trace_count"] == left
        file = tmp_path / "t.0"
        await until(file.exists)
        assert len(Traces(file).heads) == 2, "what was counted is written at once"
        await client.set(trace_count="1")
        await client.infer("twice", 1)
        await until((tmp_path / "t.1").exists)
        await client.set(trace_count=None)
        await client.infer("twice", 1)
    assert [len(Traces(tmp_path / name).heads) for name in ("t.0", "t.1", "t")] == [2, 1, 1]


async def test_requests_of_one_model(tmp_path: Path) -> None:
    models = {"one": Function(twice), "other": Function(twice)}
    async with served(tmp_path / "t", models, trace_level="OFF") as client:
        await client.infer("one", 1)
        await client.set("one", trace_level=["TIMESTAMPS"])
        for model in ("one", "other", "one"):
            await client.infer(model, 1)
        await client.set(trace_level=["TIMESTAMPS"])
        await client.set("one", trace_level=["OFF"])
        for model in ("one", "other"):
            await client.infer(model, 1)
        await client.set("one", trace_level=None)
        await client.infer("one", 1)
    assert Traces(tmp_path / "t").models == ["one", "one", "other", "one"]


async def test_a_model_counts_for_itself(tmp_path: Path) -> None:
    models = {"one": Function(twice), "other": Function(twice)}
    async with served(tmp_path / "t", models, trace_count=1) as client:
        assert (await client.set("one", trace_count="2", trace_rate="1"))["trace_count"] == "2"
        for model in ("one", "one", "one", "other", "other"):
            await client.infer(model, 1)
    written = [model for name in ("t.0", "t.1") for model in Traces(tmp_path / name).models]
    assert written == ["one", "one", "other"]
    assert not (tmp_path / "t").exists()
