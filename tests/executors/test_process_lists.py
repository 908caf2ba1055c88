"""Lists of requests, and response parameters, in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.direct_work import direct_infer, direct_stream
from tests.executors.reporting_models import (
    ON_LOOP,
    PLAIN,
    SECONDS,
    Reporting,
    code,
    load,
    reporting,
    write_reporting,
)
from tests.executors.test_process_frames import arrays, raw
from triglot import Call, Internal, NotFound, Unavailable
from triglot.core.call import ModelCall, ModelTask
from triglot.core.types import Answer
from triglot.model.config import ModelConfig
from triglot.model.scheduling import DynamicBatching

# --- lists ---

LISTS = """
Reporting.dynamic_batching = triglot.DynamicBatching(max_queue_delay={delay})
Reporting.max_batch_size = 8

{kind} infer_batch(self, inputs, calls):
    (self.folder / f"list-{{len(inputs)}}").touch()
    names = {{**globals(), "self": self, "inputs": inputs, "calls": calls, "folder": self.folder}}
    if whole := inputs[0].get("whole"):
        exec(whole.item().decode(), names)
        return names["answers"]
    answers = []
    for one, call in zip(inputs, calls):
        try:
            exec(one["code"].item().decode(), {{**names, "inputs": one, "call": call, "answers": answers}})
        except Exception as error:
            answers.append(error)
    return answers

Reporting.infer_batch = infer_batch
"""
KINDS = pytest.mark.parametrize(("infer", "kind"), [(PLAIN, "def"), (ON_LOOP, "async def")])
SAYS = "answers.append({'said': np.array([str(%s)])})"


def lists(kind: str = "def", delay: float = 0.0) -> str:
    """What makes a model take lists; `delay`: it waits so long for a list of eight."""
    return LISTS.format(kind=kind, delay=delay)


async def together(served: Reporting, texts: Sequence[str], calls: Sequence[Call] = ()) -> list[Any]:
    """What each of these has come to, executed together: outputs, or an error."""
    calls = calls or [Call() for _ in texts]
    runs = (direct_infer(served.servable, code(text), call) for text, call in zip(texts, calls, strict=True))
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*runs, return_exceptions=True)


def text_of(answer: Mapping[str, Any]) -> str:
    text: bytes = answer["said"].item()
    return text.decode()


@KINDS
async def test_each_request_of_a_list_has_its_own_inputs_call_and_answer(
    tmp_path: Path, infer: str, kind: str
) -> None:
    async with reporting(tmp_path, infer, more=lists(kind, 5.0)) as served:
        calls = [Call() for _ in range(8)]
        for number, call in enumerate(calls):
            call.request_id, call.parameters = f"r{number}", {"number": number}
        text = SAYS % "(call.request_id, call.parameters['number'], len(calls), call.batch_size)"
        answers = await together(served, [text] * 8, calls)
        assert [text_of(answer) for answer in answers] == [
            str((f"r{number}", number, 8, 8)) for number in range(8)
        ]
        assert served.files("list") == ["list-8"]


@KINDS
async def test_each_request_of_a_list_has_its_own_error(tmp_path: Path, infer: str, kind: str) -> None:
    async with reporting(tmp_path, infer, more=lists(kind, 5.0)) as served:
        texts = [
            SAYS % 1,
            "raise triglot.NotFound('no two')",
            "raise ValueError('three')",
            "answers.append(4)",
            "answers.append({'day': np.array('2026-01-01', 'M8[D]')})",
            "answers.append(triglot.core.types.Answer({'x': 1}, {'odd': object()}))",
            "answers.append(exit)",
            SAYS % 8,
        ]
        answers = await together(served, texts)
        assert (text_of(answers[0]), text_of(answers[7])) == ("1", "8")
        assert isinstance(answers[1], NotFound)
        assert answers[1].message == "no two"
        assert all(isinstance(answer, Internal) for answer in answers[2:7])
        assert "reporting version 1 failed" in str(answers[2])
        assert "returned int, expected a dict of outputs by name" in str(answers[3])
        assert "returned output 'day': numpy dtype datetime64" in str(answers[4])
        assert "returned response parameters: a value of object" in str(answers[5])
        assert served.readings()["processes_lost ended"] == 0


@pytest.mark.parametrize(
    ("text", "got"),
    [("answers = []", "returned 0, expected a list of 1"), ("answers = 5", "returned int, expected a list of 1")],
)
async def test_what_is_no_list_of_answers(tmp_path: Path, text: str, got: str) -> None:
    async with reporting(tmp_path, more=lists()) as served:
        with pytest.raises(Internal, match=f"infer_batch {got} results, one per request"):
            await served.run("1", whole=np.array(text.encode(), object))
        with pytest.raises(Internal, match="reporting version 1 failed"):
            await served.run("1", whole=np.array(b"1 / 0", object))


@KINDS
async def test_a_member_that_leaves_is_seen_and_leaves_the_others(tmp_path: Path, infer: str, kind: str) -> None:
    async with reporting(tmp_path, infer, more=lists(kind, 5.0)) as served:
        calls = [Call() for _ in range(8)]
        waits = "(folder / 'in').touch()\nwhile not calls[3].cancelled: time.sleep(0.005)\n"
        texts = [waits + SAYS % "[call.cancelled for call in calls].index(True)", *[SAYS % "call.cancelled"] * 7]
        running = asyncio.ensure_future(together(served, texts, calls))
        await served.entered("in")
        calls[3].cancel()
        answers = await running
        assert [text_of(answer) for answer in answers] == ["3", "False", "False", "True", *["False"] * 4]


@KINDS
async def test_a_list_ends_with_its_process(tmp_path: Path, infer: str, kind: str) -> None:
    async with reporting(tmp_path, infer, more=lists(kind, 5.0)) as served:
        answers = await together(served, [SAYS % 1, "os._exit(3)", *[SAYS % 1] * 6])
        assert all(isinstance(answer, Unavailable) for answer in answers)
        assert len({id(answer) for answer in answers}) == 8
        assert "exited with status 3" in str(answers[0])
        assert {text_of(answer) for answer in await together(served, [SAYS % 1] * 8)} == {"1"}


async def test_members_reach_others_on_behalf_of_their_own_call(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=lists(delay=5.0)) as served:
        calls = [Call() for _ in range(8)]

        async def reach(call: Call, _: ModelCall | ModelTask) -> Any:
            return Answer({"said": np.array([call.request_id])}, {"from": call.request_id})

        for number, call in enumerate(calls):
            call.request_id, call.reach = f"r{number}", reach
            call._read_metadata = lambda number=number: [("n", str(number))]  # type: ignore[misc]  # A default.
        text = "answer = call.infer('other', {})\n" + SAYS % (
            "(answer['said'].item(), answer.parameters, call.metadata)"
        )
        answers = await together(served, [text] * 8, calls)
        assert [text_of(answer) for answer in answers] == [
            str((f"r{number}".encode(), {"from": f"r{number}"}, {"n": str(number)})) for number in range(8)
        ]


@pytest.fixture(name="echo", scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    echoes = "Reporting.infer_batch = lambda self, inputs, calls: list(inputs)\n"
    model = load(write_reporting(tmp_path_factory.mktemp("echo"), more=echoes))
    assert model.infer_batch is not None
    yield model
    model.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.text(max_size=5), arrays(), max_size=3), min_size=1, max_size=5))
def test_any_lists_round_trip(echo: Any, requests: list[dict[str, np.ndarray[Any, Any]]]) -> None:
    answers = echo.infer_batch(requests, [Call() for _ in requests])
    assert [{name: raw(array) for name, array in answer.items()} for answer in answers] == [
        {name: raw(array) for name, array in request.items()} for request in requests
    ]


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hnp.arrays(np.uint8, 10))
def test_large_lists(echo: Any, seed: np.ndarray[Any, Any]) -> None:
    requests = [{"x": np.resize(seed, size)} for size in (5_000_000, 0, 3, 1_000_001)]
    answers = echo.infer_batch(requests, [Call() for _ in requests])
    assert all((answer["x"] == request["x"]).all() for answer, request in zip(answers, requests, strict=True))


async def test_the_configuration_makes_lists_of_them(tmp_path: Path) -> None:
    config = ModelConfig(max_batch_size=4, dynamic_batching=DynamicBatching(max_queue_delay=5.0))
    more = "Reporting.infer_batch = lambda self, inputs, calls: [{'n': np.array(len(calls))} for _ in calls]\n"
    async with reporting(tmp_path, more=more, config=config) as served:
        answers = await together(served, ["1"] * 4)
        assert [int(answer["n"]) for answer in answers] == [4, 4, 4, 4]


# --- response parameters ---

ANSWERS = """
def answer(self, value):
    return triglot.core.types.Answer({"number": np.array(1)}, {"a": 1, "b": "ü", "c": 0.5, "d": True}, final=True)
Reporting.answer = answer
"""
PARAMETERS = {"a": 1, "b": "ü", "c": 0.5, "d": True}
PUSHES = """def infer(self, inputs, call):
        call.respond(self.answer(None))"""
YIELDS = """def infer(self, inputs, call):
        yield self.answer(None)"""


@pytest.mark.parametrize("infer", [PLAIN, ON_LOOP])
async def test_the_parameters_of_an_answer_arrive(tmp_path: Path, infer: str) -> None:
    async with reporting(tmp_path, infer, more=ANSWERS) as served:
        answer = await served.run("1" if infer == PLAIN else "pass")
        assert isinstance(answer, Answer)
        assert (answer.parameters, answer.final, int(answer["number"])) == (PARAMETERS, True, 1)


@pytest.mark.parametrize("infer", [PUSHES, YIELDS, YIELDS.replace("def", "async def")])
async def test_the_parameters_of_a_streams_answers_arrive(tmp_path: Path, infer: str) -> None:
    async with reporting(tmp_path, infer, more=ANSWERS) as served:
        [answer] = [answer async for answer in direct_stream(served.servable, code("1"), Call())]
        assert isinstance(answer, Answer)
        assert (answer.parameters, answer.final) == (PARAMETERS, True)


async def test_parameters_that_cannot_be_sent(tmp_path: Path) -> None:
    text = "triglot.core.types.Answer({}, {'odd': object()})"
    async with reporting(tmp_path) as served:
        with pytest.raises(Internal, match="'reporting' returned response parameters: a value of object"):
            await served.run(text)
