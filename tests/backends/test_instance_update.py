"""A load whose configuration says other instances and nothing else: they change, the others continue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from tests.backends.triton_served import GrpcClient, in_common, ints, serving, write_model
from tests.waiting import until
from triglot.repository.config.completed import completed

CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
BATCHED = CONFIG + "max_batch_size: 8\ndynamic_batching { }\n"
REPORTING = """
import probe

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"], args["model_instance_kind"], args["model_instance_device_id"]
        probe.seen.append(("initialize", *self.name))
        probe.initializing()

    def execute(self, requests):
        probe.executing()
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + 1)])

    def finalize(self):
        probe.seen.append(("finalize", *self.name))
"""
DECOUPLED = REPORTING.replace(
    "return [self.answer(request) for request in requests]",
    """for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer(request), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)""",
)
FORMS = {
    "one by one": (REPORTING, CONFIG),
    "batched": (REPORTING, BATCHED),
    "decoupled": (DECOUPLED, CONFIG + "model_transaction_policy { decoupled: true }\n"),
}


class ReportingModel:
    """A model under explicit control, and what its instances have done."""

    def __init__(self, client: GrpcClient, folder: Path, probe: Any, config: str) -> None:
        self.client = client
        self.folder = folder
        self.probe = probe
        self.config = config

    async def load(self, *groups: str, more: str = "") -> None:
        """With these instance groups."""
        instance_groups = ", ".join(f"{{ {group} }}" for group in groups)
        text = f"{self.config}{more}instance_group [ {instance_groups} ]\n"
        await asyncio.to_thread((self.folder / "config.pbtxt").write_text, text)
        await self.client.server.manager.load_model("counted")

    async def counts(self) -> tuple[int, int]:
        """How often `initialize` and `finalize` have been called, after a request that is answered."""
        shape = ints(1, 2)[None] if "max_batch_size" in self.config else ints(1, 2)
        if "decoupled" not in self.config:
            assert (await self.client.infer("counted", {"X": shape})).outputs["Y"].flatten().tolist() == [2, 3]
        return self.calls("initialize"), self.calls("finalize")

    def calls(self, name: str) -> int:
        return sum(event[0] == name for event in self.probe.seen)

    def running(self) -> list[tuple[str, str, str]]:
        """The instances that have been initialized and not finalized."""
        running = [event[1:] for event in self.probe.seen if event[0] == "initialize"]
        for event in self.probe.seen:
            if event[0] == "finalize":
                running.remove(event[1:])
        return sorted(running)


@asynccontextmanager
async def reporting_model(
    monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, config: str, **options: Any
) -> AsyncIterator[ReportingModel]:
    probe = in_common(monkeypatch)
    probe.initializing = probe.executing = lambda: None
    model = write_model(folder, "counted", code, config)
    async with serving(folder, model_control_mode="explicit", **options) as client:
        yield ReportingModel(client, model, probe, config)


@pytest.mark.parametrize("form", FORMS)
async def test_instances_come_and_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str) -> None:
    async with reporting_model(monkeypatch, tmp_path, *FORMS[form]) as model:
        await model.load("count: 3 kind: KIND_CPU")
        assert await model.counts() == (3, 0)
        await model.load("count: 4 kind: KIND_CPU")
        assert await model.counts() == (4, 0)
        await model.load("count: 2 kind: KIND_CPU")
        assert await model.counts() == (4, 2)
        await model.load("count: 3 kind: KIND_CPU")
        assert await model.counts() == (5, 2)
        assert len(set(model.running())) == 3
        model.client.server.manager.unload_model("counted")
        await until(lambda: model.calls("finalize") == 5)
    assert model.running() == []


async def test_names_and_groups_make_no_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load('name: "one" count: 3 kind: KIND_CPU')
        await model.load('name: "a" count: 1 kind: KIND_CPU', 'name: "b" count: 2 kind: KIND_CPU')
        assert await model.counts() == (3, 0)
        await model.load("count: 1 kind: KIND_CPU")
        await model.load("count: 0 kind: KIND_CPU")  # Which is one.
        assert await model.counts() == (3, 2)


@pytest.mark.parametrize("form", FORMS)
async def test_a_configuration_that_is_sent_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    async with reporting_model(monkeypatch, tmp_path, *FORMS[form]) as model:
        await model.load("count: 1 kind: KIND_CPU")
        manager = model.client.server.manager
        message = completed(manager.loaded(manager.registry.servable("counted")))
        for count in (2, 3, 1):
            message.instance_group[0].count = count
            text = json_format.MessageToJson(message, preserving_proto_field_name=True)
            await manager.load_model("counted", text)
        assert await model.counts() == (3, 2)
        message.parameters["another"].string_value = "one"
        message.instance_group[0].count = 2
        await manager.load_model("counted", json_format.MessageToJson(message, preserving_proto_field_name=True))
        await until(lambda: model.calls("finalize") == 3)
        assert await model.counts() == (5, 3)


async def test_the_devices_say_which_instances_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load("count: 2 kind: KIND_CPU", "count: 1 kind: KIND_GPU gpus: [ 0 ]")
        assert await model.counts() == (3, 0)
        await model.load("count: 1 kind: KIND_CPU", "count: 3 kind: KIND_GPU gpus: [ 0 ]")
        assert await model.counts() == (5, 1)
        await model.load("count: 2 kind: KIND_GPU gpus: [ 0 ]", "count: 2 kind: KIND_CPU")
        assert await model.counts() == (6, 2)
        assert [instance[1:] for instance in model.running()].count(("GPU", "0")) == 2


async def test_what_else_differs_is_loaded_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load("count: 2 kind: KIND_CPU")
        await model.load("count: 3 kind: KIND_CPU", more='parameters { key: "a" value { string_value: "b" } }\n')
        await until(lambda: model.calls("finalize") == 2)
        assert await model.counts() == (5, 2)
        file = model.folder / "1" / "model.py"
        file.write_text(file.read_text() + "\n# another\n")
        await model.load("count: 4 kind: KIND_CPU", more='parameters { key: "a" value { string_value: "b" } }\n')
        await until(lambda: model.calls("finalize") == 5)
        assert await model.counts() == (9, 5)


async def test_an_instance_comes_while_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load("count: 1 kind: KIND_CPU")
        model.probe.executing = lambda: (model.probe.begun.set(), model.probe.returned.wait(30))
        first = asyncio.create_task(model.client.infer("counted", {"X": ints(1)}))
        assert await asyncio.to_thread(model.probe.begun.wait, 30)
        second = asyncio.create_task(model.client.infer("counted", {"X": ints(2)}))
        model.probe.executing = lambda: None
        await model.load("count: 2 kind: KIND_CPU")
        await second  # It waited for the first one's instance, and has another now.
        assert not first.done()
        model.probe.returned.set()
        await first


async def test_calls_go_on_while_an_instance_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load("count: 1 kind: KIND_CPU")
        model.probe.initializing = lambda: (model.probe.begun.set(), model.probe.returned.wait(30))
        loading = asyncio.create_task(model.load("count: 2 kind: KIND_CPU"))
        assert await asyncio.to_thread(model.probe.begun.wait, 30)
        assert await model.counts() == (2, 0)
        assert not loading.done()
        model.probe.returned.set()
        await loading


@pytest.mark.parametrize("form", FORMS)
async def test_an_instance_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    def fails_at_last() -> None:
        if model.calls("initialize") == 4:
            raise RuntimeError("no room left")

    async with reporting_model(monkeypatch, tmp_path, *FORMS[form]) as model:
        await model.load("count: 2 kind: KIND_CPU")
        model.probe.initializing = fails_at_last
        with pytest.raises(Exception, match="no room left"):
            await model.load("count: 4 kind: KIND_CPU")
        assert await model.counts() == (4, 1)
        model.probe.initializing = lambda: None
        await model.load("count: 3 kind: KIND_CPU")
        assert await model.counts() == (5, 1)


@pytest.mark.parametrize("form", FORMS)
async def test_change_after_a_timeout_is_a_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    async with reporting_model(monkeypatch, tmp_path, *FORMS[form], load_timeout=0.5) as model:
        await model.load("count: 1 kind: KIND_CPU")
        model.probe.initializing = lambda: model.probe.returned.wait(30)
        with pytest.raises(Exception, match=r"loading took longer than load_timeout, 0\.5 s"):
            await model.load("count: 2 kind: KIND_CPU")
        assert (await model.counts())[1] == 0
        model.probe.initializing = lambda: None
        model.probe.returned.set()
        await model.load("count: 3 kind: KIND_CPU")
        await until(lambda: model.calls("finalize") == 2)
        assert await model.counts() == (5, 2)


async def test_a_configuration_that_is_wrong_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load("count: 3 kind: KIND_CPU")
        with pytest.raises(Exception, match="instance_group"):
            await model.load("--- invalid ---")
        await model.load("count: 2 kind: KIND_CPU")
        assert await model.counts() == (3, 1)


SEQUENCES = """
backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
max_batch_size: 1
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [ { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } ]
}
"""
SUMMING = (
    REPORTING.replace(
        'Y", x + 1)',
        'Y", self.sum(request, x))',
    )
    + """
    def sum(self, request, x):
        start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().item()
        self.total = x if start else self.total + x
        return self.total
"""
)


async def test_sequences_go_on_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def send(sequence_id: int, value: int, *, start: bool = False, end: bool = False) -> int:
        parameters = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        reply = await model.client.infer("counted", {"X": ints(value)[None]}, parameters=parameters)
        return int(reply.outputs["Y"].item())

    async with reporting_model(monkeypatch, tmp_path, SUMMING, SEQUENCES) as model:
        await model.load("count: 2 kind: KIND_CPU")
        assert [await send(1, 10, start=True), await send(2, 20, start=True)] == [10, 20]
        waiting = asyncio.create_task(send(3, 30, start=True))  # For a slot.
        await model.load("count: 3 kind: KIND_CPU")
        assert await waiting == 30
        await model.load("count: 1 kind: KIND_CPU")
        assert [await send(1, 1), await send(2, 2), await send(3, 3)] == [11, 22, 33]
        assert (model.calls("initialize"), model.calls("finalize")) == (3, 0)
        assert await send(3, 1, end=True) == 34
        await until(lambda: model.calls("finalize") == 1)
        assert [await send(2, 1, end=True), await send(1, 1, end=True)] == [23, 12]
        await until(lambda: model.calls("finalize") == 2)
        assert len(model.running()) == 1
        assert await send(4, 5, start=True) == 5
        waiting = asyncio.create_task(send(5, 6, start=True))
        await model.load("count: 2 kind: KIND_CPU")
        assert await waiting == 6
        assert (model.calls("initialize"), model.calls("finalize")) == (4, 2)
        await model.load("count: 1 kind: KIND_CPU")
        # Unloaded while an instance is to go when its sequence is over.
        model.client.server.manager.unload_model("counted")
        assert [await send(4, 1, end=True), await send(5, 1, end=True)] == [6, 7]
        await until(lambda: model.calls("finalize") == 4)


PLAIN = """
import os
import threading

import triglot

class Plain(triglot.Model):
    inputs = [triglot.TensorSpec("X", "INT32", [-1])]
    outputs = [triglot.TensorSpec("Y", "INT64", [2])]

    def infer(self, inputs):
        return {"Y": [os.getpid(), threading.get_ident()]}

    def load(self, folder):
        (folder.parents[2] / f"loaded.{os.getpid()}.{id(self)}").touch()
"""


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_models_of_our_own(tmp_path: Path, execution: str) -> None:
    repository = tmp_path / "repository"
    folder = repository / "plain" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(PLAIN)

    async def load(count: int) -> None:
        text = f'instance_group [ {{ count: {count} kind: KIND_CPU }} ]\nbackend: "python"\n'
        if execution == "process":
            text += 'parameters { key: "execution" value { string_value: "process" } }\n'
        await asyncio.to_thread((repository / "plain" / "config.pbtxt").write_text, text)
        await client.server.manager.load_model("plain")

    def loaded() -> int:
        return len(list(tmp_path.glob("loaded.*")))

    async with serving(repository, model_control_mode="explicit") as client:
        await load(2)
        before = loaded()
        assert before == (2 if execution == "process" else 1)
        await load(3)
        assert loaded() == (3 if execution == "process" else 1)
        await load(1)
        answers = await asyncio.gather(*[client.infer("plain", {"X": ints(1)}) for _ in range(20)])
        assert len({tuple(answer.outputs["Y"].tolist()) for answer in answers}) == 1
        assert (answers[0].outputs["Y"][0] == os.getpid()) == (execution == "thread")
        await load(2)
        assert loaded() == (4 if execution == "process" else 1)


async def test_unloading_while_an_instance_is_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with reporting_model(monkeypatch, tmp_path, REPORTING, CONFIG) as model:
        await model.load("count: 1 kind: KIND_CPU")
        model.probe.executing = lambda: (model.probe.begun.set(), model.probe.returned.wait(30))
        running = asyncio.create_task(model.client.infer("counted", {"X": ints(1)}))
        assert await asyncio.to_thread(model.probe.begun.wait, 30)
        await model.load("count: 2 kind: KIND_CPU")
        leaving = asyncio.create_task(model.load("count: 1 kind: KIND_GPU gpus: [ 0 ]"))
        await until(lambda: model.calls("initialize") == 3)
        model.client.server.manager.unload_model("counted")
        model.probe.returned.set()
        await running
        with pytest.raises(Exception, match="was unloaded"):
            await leaving
        await until(lambda: model.calls("finalize") == 3)
        with pytest.raises(grpc.aio.AioRpcError, match="counted"):
            await model.counts()
