"""Triton Python models that have their requests rescheduled, until they answer (`iterative_sequence`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.backends.triton_served import DECOUPLED, X_TO_Y, GrpcClient, ints, reply, request, serving, write_model

BATCHING = """
max_batch_size: 4
sequence_batching {{
  iterative_sequence: true
  {strategy}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {datatype} }} ] }}
  ]
}}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""
NOTES = """
class TritonPythonModel:
    \"\"\"Counts down from X, once each time that it is called, and answers with how often it was.\"\"\"

    def initialize(self, args):
        self.left, self.count = {}, {}

    KIND execute(self, requests):
        responses = []
        for request in requests:
            start, x = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0].item()
                for name in ("START", "X")
            )
            corrid = pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy().ravel()[0]
            mine = request.correlation_id()
            assert (corrid.decode() if isinstance(corrid, bytes) else corrid) == mine
            assert bool(start) == bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            assert bool(start) == (mine not in self.left)
            self.left[mine] = (x if start else self.left[mine]) - 1
            self.count[mine] = self.count.get(mine, 0) + 1
            RESPOND
        return RETURNED
"""
ONCE = """if self.left[mine] > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                del self.left[mine]
                tensor = pb_utils.Tensor("Y", np.array([[self.count.pop(mine)]], np.int32))
                responses.append(pb_utils.InferenceResponse([tensor]))"""
EACH_TIME = """sender = request.get_response_sender()
            tensor = pb_utils.Tensor("Y", np.array([[self.count[mine]]], np.int32))
            sender.send(pb_utils.InferenceResponse([tensor]))
            if self.left[mine] > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                del self.left[mine], self.count[mine]
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""
DIRECT, OLDEST = "direct { }", "oldest { max_candidate_sequences: 8 }"
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'


def written(
    folder: Path,
    strategy: str = DIRECT,
    datatype: str = "TYPE_UINT64",
    *,
    kind: str = "def",
    decoupled: bool = False,
    more: str = "",
) -> Path:
    code = NOTES.replace("KIND", kind).replace("RETURNED", "None" if decoupled else "responses")
    code = code.replace("RESPOND", EACH_TIME if decoupled else ONCE)
    tensors = (DECOUPLED if decoupled else X_TO_Y) + BATCHING.format(strategy=strategy, datatype=datatype)
    return write_model(folder, "m", code, tensors + more)


async def answer(client: GrpcClient, x: int, **fields: Any) -> int:
    outputs = (await client.infer("m", {"X": ints(x)[None]}, **fields)).outputs
    return int(outputs["Y"].item())


async def answers(client: GrpcClient, x: int) -> list[int]:
    stream = client.stream([request("m", {"X": ints(x)[None]})])
    return [reply(response.infer_response).outputs["Y"].item() async for response in stream]


@pytest.mark.parametrize("place", ["", PROCESS], ids=["thread", "process"])
@pytest.mark.parametrize("datatype", ["TYPE_UINT64", "TYPE_INT32", "TYPE_STRING"])
@pytest.mark.parametrize("strategy", [DIRECT, OLDEST], ids=["direct", "oldest"])
async def test_until_it_answers(strategy: str, datatype: str, place: str, tmp_path: Path) -> None:
    async with serving(written(tmp_path, strategy, datatype, more=place)) as client:
        wanted = [1, 7, 2, 3, 30, 1, 5]
        assert await asyncio.gather(*(answer(client, x) for x in wanted)) == wanted


async def test_what_a_request_says_of_its_sequence(tmp_path: Path) -> None:
    async with serving(written(tmp_path)) as client:
        parameter_sets: list[dict[str, Any]] = [
            {"sequence_id": 7},
            {"sequence_id": 7, "sequence_start": True},
            {"sequence_end": True},
            {},
        ]
        assert [await answer(client, 3, parameters=parameters) for parameters in parameter_sets] == [3] * 4


async def test_a_coroutine(tmp_path: Path) -> None:
    async with serving(written(tmp_path, kind="async def")) as client:
        assert [await answer(client, x) for x in (1, 4)] == [1, 4]


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("place", ["", PROCESS], ids=["thread", "process"])
async def test_a_decoupled_model(place: str, kind: str, tmp_path: Path) -> None:
    async with serving(written(tmp_path, kind=kind, decoupled=True, more=place)) as client:
        found = await asyncio.gather(*(answers(client, x) for x in (1, 5, 3)))
        assert found == [[1], [1, 2, 3, 4, 5], [1, 2, 3]]


TWO = "oldest { max_candidate_sequences: 8 preferred_batch_size: 2 max_queue_delay_microseconds: 20000000 }"


async def test_an_error_later_on_is_of_those_that_are_left(tmp_path: Path) -> None:
    """Two requests are executed together; one has its answer, and the other one fails when it is rescheduled."""
    path = written(tmp_path, TWO)
    file = path / "1" / "model.py"
    fails = (
        "        if len(requests) == 1 and self.left:\n            raise ValueError('alone')\n        for request"
    )
    file.write_text(file.read_text().replace("        for request", fails, 1))
    async with serving(path) as client:
        first = asyncio.create_task(answer(client, 1))
        with pytest.raises(grpc.aio.AioRpcError, match="alone"):
            await answer(client, 2)
        assert await first == 1


async def test_who_comes_again_has_no_answer_yet(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = path / "1" / "model.py"
    early = "responses.append(pb_utils.InferenceResponse([]))"
    file.write_text(file.read_text().replace("responses.append(None)", early, 1))
    expected = "Expected a None object in the execute function return list for reschduled request, found type 'Inf"
    async with serving(path) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=expected):
            await answer(client, 2)
        assert await answer(client, 1) == 1


GENERATES = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = 0

    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            self.left = (self.left or x.item()) - 1
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full(x.shape, self.left, np.int32))])
            if self.left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            request.get_response_sender().send(response, flags=0 if self.left else 1)
"""
AGAIN = "sequence_batching { iterative_sequence: true }"
UNSUPPORTED = [
    "sequence_batching { direct { } iterative_sequence: false }",
    "sequence_batching { oldest { } iterative_sequence: false }",
    "dynamic_batching { }",
]


@pytest.mark.parametrize("shape", [[], [1]])
async def test_as_in_tritons_own_tests(tmp_path: Path, shape: list[int]) -> None:
    """Without controls, and with responses that end with the last one."""
    config = DECOUPLED.replace("-1", "1") + AGAIN + f"\nmax_batch_size: {4 * len(shape)}"
    write_model(tmp_path, "m", GENERATES, config)
    async with serving(tmp_path) as client:
        for _ in range(2):
            stream = client.stream([request("m", {"X": ints(3).reshape([*shape, 1])})])
            found = [reply(response.infer_response).outputs["Y"].tolist() async for response in stream]
            assert np.reshape(found, -1).tolist() == [2, 1, 0]


@pytest.mark.parametrize("batching", UNSUPPORTED)
async def test_schedulers_that_do_not_take_requests_back(tmp_path: Path, batching: str) -> None:
    write_model(tmp_path, "m", GENERATES, DECOUPLED.replace("-1", "1") + batching + "\nmax_batch_size: 4")
    fields = {"parameters": {"sequence_id": 1, "sequence_start": True}}
    async with serving(tmp_path) as client:
        [only] = [response async for response in client.stream([request("m", {"X": ints(3)[None]}, **fields)])]
        assert "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE" in only.error_message


async def test_a_model_that_keeps_the_sender_of_who_has_left(tmp_path: Path) -> None:
    path = written(tmp_path, decoupled=True)
    file = path / "1" / "model.py"
    kept = "sender = request.get_response_sender()"
    file.write_text(file.read_text().replace(kept, f"{kept}\n            self.kept = sender", 1))
    async with serving(path) as client:
        async for _ in client.stream([request("m", {"X": ints(2**31 - 1)[None]})]):
            break
        assert await answers(client, 2) == [1, 2]


@pytest.mark.parametrize("decoupled", [False, True])
async def test_who_leaves_is_not_executed_for_ever(decoupled: bool, tmp_path: Path) -> None:
    async with serving(written(tmp_path, decoupled=decoupled)) as client:
        endless = 2**31 - 1
        if decoupled:
            async for _ in client.stream([request("m", {"X": ints(endless)[None]})]):
                break
            assert await answers(client, 2) == [1, 2]
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await client.infer("m", {"X": ints(endless)[None]}, timeout=0.2)
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await answer(client, 2) == 2
