"""Dynamic batching of a project's model, by the server and inside a DAG: who shares a batch, and the outcomes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.backends.grps_batches import DOUBLES, NEVER, ODD, SINGLE, SIZES, STREAMS, in_dag
from tests.backends.grps_folders import IMPORTS, PATIENCE, batched, entry, own_module, write_project
from tests.backends.grps_served import PREDICT, SERVICE, Served, served
from tests.waiting import until
from triglot.backends.grps.settings import ProjectSettings
from triglot.pb.grps.grps_pb2 import GrpsMessage

Project = Callable[..., ProjectSettings]


@pytest.fixture(params=["by the server", "in a DAG"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    """Projects whose model is batched by the server, or stands in a DAG before one that hands on what it gets."""

    def write(
        code: str, size: int, timeout_us: int = NEVER, *, model: dict[str, Any] | None = None, **keys: Any
    ) -> ProjectSettings:
        batched_model = entry(batching=batched(size, timeout_us), **(model or {}))
        if request.param == "in a DAG":
            return in_dag(tmp_path, code, batched_model, **keys)
        return write_project(tmp_path, code, models=[batched_model], **keys)

    return write


async def answers_to(server: Served, *texts: str, model: str = "") -> list[str]:
    """What calls with these texts, all at once, are answered with: a text, or an error's."""
    answers = await asyncio.gather(*[server.predict(GrpsMessage(str_data=text, model=model)) for text in texts])
    return [answer.str_data if answer.status.code == 200 else answer.status.msg for answer in answers]


async def readings(server: Served, name: str) -> dict[str, float]:
    """The values of a metric of the batches, by the label `reason`."""
    _, text = await server.ask("GET", "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith(f"triglot_{name}")]
    return {line.partition('reason="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_full_batches_run_at_once(project: Project) -> None:
    async with served(project(SIZES, 2)) as server:
        assert await answers_to(server, *"abcdef") == [f"{text}@2" for text in "abcdef"]
        assert (await readings(server, "batches_closed_total"))["full"] == 3


async def test_batches_in_a_dag_of_several_models_are_counted_for_each(tmp_path: Path) -> None:
    models = [entry("first", batching=batched(2, NEVER)), entry("second", batching=batched(1, NEVER))]
    nodes = ["first-1.0.0", "second-1.0.0"]
    async with served(write_project(tmp_path, SIZES, models=models, nodes=nodes)) as server:
        assert await answers_to(server, "a", "b") == ["a@2@1", "b@2@1"]
        _, text = await server.ask("GET", "/metrics")
    lines = text.decode().splitlines()
    counts = {
        line.partition('dag_model="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("triglot_batches_closed_total") and 'reason="full"' in line
    }
    assert counts == {"first-1.0.0": 1, "second-1.0.0": 2}


@pytest.mark.parametrize("model", ["", "m-1.0.0"], ids=["DAG", "model"])
async def test_a_dag_of_one_model_and_the_model_itself(tmp_path: Path, model: str) -> None:
    async with served(write_project(tmp_path, SIZES, models=[entry(batching=batched(3, NEVER))])) as server:
        assert await answers_to(server, *"abc", model=model) == ["a@3", "b@3", "c@3"]


async def test_every_interface_leads_into_the_same_batch(project: Project) -> None:
    """A grps call by gRPC and by HTTP, a stream, and a KServe client's arrays."""
    async with served(project(SIZES, 4)) as server:
        tensor = {"name": "str_data", "datatype": "BYTES", "shape": [1], "data": ["d"]}
        grpc_answer, stream, http, kserve = await asyncio.gather(
            server.predict(GrpsMessage(str_data="a")),
            server.stream(GrpsMessage(str_data="b")),
            server.ask("POST", PREDICT, {"str_data": "c"}),
            server.ask("POST", "/v2/models/the_dag/infer", {"inputs": [tensor]}),
        )
        assert grpc_answer.str_data == "a@4"
        assert stream == []
        assert http[1]["str_data"] == "c@4"
        assert kserve[1]["outputs"][0]["data"] == ["@4"]  # The project gets gtensors.


async def test_a_window_that_ends(project: Project) -> None:
    async with served(project(SIZES, 100, timeout_us=1)) as server:
        assert await answers_to(server, "a") == ["a@1"]
        assert (await readings(server, "batches_closed_total"))["delay"] == 1


async def test_a_window_of_any_length_is_waited_for(project: Project) -> None:
    async with served(project(SIZES, 2, timeout_us=10**18)) as server:
        assert await answers_to(server, *"ab") == ["a@2", "b@2"]


@pytest.mark.parametrize(("size", "pool"), [(1, 8), (8, 1)])
async def test_batches_of_one(project: Project, size: int, pool: int) -> None:
    async with served(project(SIZES, size, max_concurrency=pool)) as server:
        assert await answers_to(server, "a", "b") == ["a@1", "b@1"]


async def test_batches_are_no_larger_than_the_pool(project: Project) -> None:
    async with served(project(SIZES, 100, max_concurrency=2)) as server:
        assert await answers_to(server, *"abcdef") == [f"{text}@2" for text in "abcdef"]


async def test_as_many_batches_run_as_the_pool_has_places_for(project: Project) -> None:
    code = """
running, most, gate = [], [], threading.Barrier(2)


class Meets(Base):
    def infer(self, inp, context):
        raise AssertionError

    def batch_infer(self, inps, contexts):
        running.extend(inps)
        most.append(len(running))
        gate.wait(30)
        del running[: len(inps)]
        gate.wait(30)
        return inps


inferer_register.register("inferer", Meets())
"""
    async with served(project(code, 2, max_concurrency=4)) as server:
        assert await answers_to(server, *"abcdefgh") == list("abcdefgh")
        assert max(own_module().most) == 4


async def test_a_converter_works_on_batches(project: Project) -> None:
    converter = """
class Numbers(Converter):
    def init(self, path=None, args=None):
        super().init(path, args)

    def preprocess(self, inp, context):
        raise AssertionError

    postprocess = preprocess

    def batch_preprocess(self, inps, contexts):
        assert all(context.converter is self for context in contexts)
        for inp, context in zip(inps, contexts):
            context.put_user_data("text", inp.str_data)
            if inp.str_data == "bad":
                context.set_err_msg("no number")
        return [0 if inp.str_data == "bad" else int(inp.str_data) for inp in inps]

    def batch_postprocess(self, numbers, contexts):
        return [
            GrpsMessage(str_data=f"{context.get_user_data('text')}:{number}@{len(numbers)}")
            for number, context in zip(numbers, contexts)
        ]


converter_register.register("numbers", Numbers())
"""
    numbers = {"converter_type": "customized", "converter_name": "numbers"}
    files = {"src/customized_converter.py": IMPORTS + converter}
    async with served(project(DOUBLES, 2, model=numbers, files=files)) as server:
        assert await answers_to(server, "1", "2") == ["1:2@2", "2:4@2"]
        assert await answers_to(server, "bad", "2") == ["no number", "2:4@2"]
        ran = list(own_module().ran)
        # With an error in every context the inferer is not called.
        assert await answers_to(server, "bad", "bad") == ["no number"] * 2
        assert own_module().ran == ran
        assert (
            await answers_to(server, "1", "x") == ["ValueError: invalid literal for int() with base 10: 'x'"] * 2
        )


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "err one"], ["a@2", "err one"]),
        (["err one", "err two"], ["err one", "err two"]),
        (["raise", "a"], ["ValueError: boom"] * 2),
        (["exit", "a"], ["SystemExit: gone"] * 2),
        (["more", "a"], ["ValueError: the batch has 3 outputs, expected 2, one per request"] * 2),
        (["none", "a"], ["Output type must be GrpsMessage."] * 2),
        (["fewer", "fewer"], ["Output type must be GrpsMessage.", "fewer@2"]),
    ],
    ids=lambda texts: "-".join(texts).replace(" ", "_")[:30],
)
async def test_members_get_their_own_outcomes(
    project: Project, texts: Sequence[str], expected: Sequence[str]
) -> None:
    async with served(project(ODD, 2)) as server:
        assert sorted(await answers_to(server, *texts)) == sorted(expected)
        # The loop lives on.
        assert await answers_to(server, "a", "b") == ["a@2", "b@2"]


async def test_without_batch_methods(project: Project) -> None:
    async with served(project(SINGLE, 1)) as server:
        assert await answers_to(server, "a") == [
            "NotImplementedError: Single has no batch_infer, which dynamic batching needs"
        ]


async def test_what_is_no_message_leaves_the_others_alone(project: Project) -> None:
    async with served(project(SIZES, 3)) as server:
        call = server.channel.unary_unary(SERVICE + "Predict")
        not_utf_8 = GrpsMessage(str_data="x").SerializeToString().replace(b"x", b"\xff")
        broken, *others = await asyncio.gather(call(not_utf_8), answers_to(server, "a"), answers_to(server, "b"))
        assert GrpsMessage.FromString(broken).status.msg.startswith("the request is not a GrpsMessage: ")
        assert others == [["a@2"], ["b@2"]]


async def test_a_caller_who_left_is_in_no_batch(tmp_path: Path) -> None:
    async with served(write_project(tmp_path, SIZES, models=[entry(batching=batched(2, NEVER))])) as server:
        cancelled = server.channel.unary_unary(SERVICE + "Predict")(
            GrpsMessage(str_data="gone").SerializeToString()
        )
        await until(lambda: server.server.dataplane.queue_depth() == 1)
        cancelled.cancel()
        await until(lambda: server.server.dataplane.queue_depth() == 0)
        assert await answers_to(server, "a", "b") == ["a@2", "b@2"]


@pytest.mark.parametrize("order", ["rf", "fr", "sf"])
async def test_a_final_answer_releases_its_request(project: Project, order: str) -> None:
    """Nothing but its own answers is sent to it, whatever becomes of the batch."""
    async with served(project(STREAMS, 2)) as server:
        calls = {text: asyncio.create_task(server.stream(GrpsMessage(str_data=text))) for text in order}
        final = await asyncio.wait_for(calls.pop("f"), PATIENCE)
        assert [answer.str_data for answer in final] == ["f1", "f2"]
        ((other, last),) = calls.items()
        assert not last.done()
        gate: threading.Event = own_module().gate
        gate.set()
        answers = await asyncio.wait_for(last, PATIENCE)
        texts = [answer.str_data for answer in answers if answer.status.code == 200]
        failed = [answer.status.msg for answer in answers if answer.status.code != 200]
        assert texts == [f"{other}1", f"{other}2", "end"]
        assert failed == (["ValueError: boom"] if other == "r" else [])
