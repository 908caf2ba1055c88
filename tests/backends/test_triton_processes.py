"""Triton's Python models whose instances are processes, through a server's ports: they answer as on threads."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.backends.triton_served import (
    DECOUPLED,
    MODELS,
    X_TO_Y,
    GrpcClient,
    copied,
    ints,
    reply,
    request,
    serving,
    text,
    write_model,
)
from triglot import ModelLoadError

SUM = {"INPUT0": np.arange(4, dtype=np.float32), "INPUT1": np.full(4, 2, np.float32)}
IN_A_PROCESS = '\nparameters { key: "execution" value { string_value: "process" } }\n'


@asynccontextmanager
async def in_processes(folder: Path, *names: str) -> AsyncIterator[GrpcClient]:
    """Some of the models that lie beside the tests, each in processes."""
    paths = copied(folder, *(names or sorted(path.name for path in MODELS.iterdir())))
    for path in paths:
        with (path / "config.pbtxt").open("a") as config:
            config.write(IN_A_PROCESS)
    async with serving(*paths) as client:
        yield client


async def test_models_that_call_others(tmp_path: Path) -> None:
    async with in_processes(tmp_path) as client:
        for inputs in (SUM, SUM | {"INPUT0": SUM["INPUT0"] * 2}):
            total = inputs["INPUT0"] + inputs["INPUT1"]
            for model, more in (("add_sub", {}), ("bls_sync", {"MODEL_NAME": text("add_sub")}), ("bls_async", {})):
                outputs = (await client.infer(model, inputs | more)).outputs
                assert (outputs["OUTPUT0"] == total).all()
        assert (await client.infer("bls_square", {"IN": ints(5)})).outputs["SUM"].tolist() == [25]
        assert (await client.infer("bls_square_async", {"IN": ints(5)})).outputs["SUM"].tolist() == [50]
        answer = await client.infer("add_sub", SUM, outputs=["OUTPUT1"])
        assert list(answer.outputs) == ["OUTPUT1"]
        _, message = await client.failure("bls_sync", SUM | {"MODEL_NAME": text("nope")})
        assert "nope" in message


async def test_what_a_model_knows_and_its_responses_parameters(tmp_path: Path) -> None:
    async with in_processes(tmp_path, "what_came") as client:
        answer = await client.infer("what_came", {"TEXT": text("a")[None]}, id="seven", parameters={"mine": 3})
        assert answer.parameters == {"words": 2, "short": True, "of": "it"}
        seen = json.loads(answer.outputs["SAID"].item())
        assert seen["args"]["model_name"] == "what_came"
        assert seen["args"]["model_instance_name"] in {f"what_came_0_{number}" for number in range(4)}
        assert "seven" in seen.values()
        assert json.loads(seen["args"]["model_config"])["parameters"]["execution"] == {"string_value": "process"}


HOLDS = '''
class TritonPythonModel:
    """Answers nothing before so many requests have come, then each as many times as it asks."""

    def initialize(self, args):
        self.held = []

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            self.held.append((count, request.get_response_sender()))
        if len(self.held) == 20:
            for held in self.held:
                threading.Thread(target=self.send, args=held).start()
            self.held = []

    def send(self, count, sender):
        for number in range(count):
            tensor = pb_utils.Tensor("Y", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([tensor], parameters={"left": count - number}))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


async def test_a_decoupled_model_has_many_requests_in_flight(tmp_path: Path) -> None:
    path = write_model(tmp_path, "holds", HOLDS, DECOUPLED + IN_A_PROCESS)
    async with serving(path) as client:

        async def read(count: int) -> list[tuple[int, int]]:
            messages = [message async for message in client.stream([request("holds", {"X": ints(count)})])]
            assert not any(message.error_message for message in messages)
            answers = [reply(message.infer_response) for message in messages]
            return [(answer.outputs["Y"].item(), answer.parameters["left"]) for answer in answers]

        read_answers = await asyncio.gather(*map(read, range(20)))
        assert read_answers == [[(number, count - number) for number in range(count)] for count in range(20)]


ASKS = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.work, args=(request.get_response_sender(),)).start()

    def work(self, sender):
        inputs = [pb_utils.Tensor(name, np.ones(4, np.float32)) for name in ("INPUT0", "INPUT1")]
        asked = pb_utils.InferenceRequest(
            model_name="add_sub", requested_output_names=["OUTPUT0"], inputs=inputs
        )
        answer = asked.exec()
        if answer.has_error():
            sender.send(pb_utils.InferenceResponse(error=answer.error()), FINAL)
            return
        total = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy().sum()
        tensor = pb_utils.Tensor("Y", np.array([total + pb_utils.is_model_ready("add_sub")], np.int32))
        sender.send(pb_utils.InferenceResponse([tensor]), FINAL)
"""


async def test_threads_of_a_decoupled_models_own_call_others(tmp_path: Path) -> None:
    path = write_model(tmp_path, "asks", ASKS, DECOUPLED + IN_A_PROCESS)
    async with serving(path, *copied(tmp_path, "add_sub")) as client:

        async def read() -> list[Any]:
            messages = [message async for message in client.stream([request("asks", {"X": ints(1)})])]
            return [reply(message.infer_response).outputs["Y"].item() for message in messages]

        assert await asyncio.gather(*(read() for _ in range(10))) == [[9]] * 10


LISTS = """
import os, sys
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if x[0, 0] == 13:
                os._exit(13)
            if x[0, 0] < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(
                    "below zero", pb_utils.TritonError.INVALID_ARG)))
            else:
                y = pb_utils.Tensor("Y", np.full_like(x, len(requests)))
                responses.append(pb_utils.InferenceResponse([y], parameters={"x": int(x[0, 0])}))
        return responses
"""
BATCHED = X_TO_Y + "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 5000000 }\n"


async def test_lists_of_requests(tmp_path: Path) -> None:
    path = write_model(tmp_path, "lists", LISTS, BATCHED + IN_A_PROCESS)
    async with serving(path) as client:
        runs = [client.infer("lists", {"X": ints(number)[None]}) for number in (1, 2, -1, 4, 5, 6, 7, 8)]
        answers = await asyncio.gather(*runs, return_exceptions=True)
        failed = answers.pop(2)
        assert isinstance(failed, grpc.aio.AioRpcError)
        assert (failed.code(), failed.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "below zero")
        answered = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert {answer.outputs["Y"].item() for answer in answered} == {8}
        assert [answer.parameters["x"] for answer in answered] == [1, 2, 4, 5, 6, 7, 8]
        runs = [client.infer("lists", {"X": ints(number)[None]}) for number in range(10, 18)]
        for lost in await asyncio.gather(*runs, return_exceptions=True):
            assert isinstance(lost, grpc.aio.AioRpcError)
            assert lost.code() is grpc.StatusCode.UNAVAILABLE
            assert "exited with status 13" in (lost.details() or "")


FAILS = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("no weights for " + args["model_name"])

    def execute(self, requests):
        return []
"""


@pytest.mark.parametrize("config", [X_TO_Y, DECOUPLED])
async def test_an_initialize_that_fails_says_why(
    tmp_path: Path, config: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path, "fails", FAILS, config + IN_A_PROCESS)
    with pytest.raises(ModelLoadError, match="1 of the models"):
        async with serving(path):
            pass
    [message] = [record.getMessage() for record in caplog.records if "could not be loaded" in record.getMessage()]
    assert re.search(r"model\.py:\d+: RuntimeError: no weights for fails", message)


ENDS = """
class TritonPythonModel:
    def initialize(self, args):
        self.folder = pb_utils.get_model_dir()
        pb_utils.Logger.log_info("begun " + args["model_instance_name"])

    def execute(self, requests):
        raise ValueError("odd input")

    def finalize(self):
        open(self.folder + "/finalized", "a").write("x")
"""


@pytest.mark.parametrize("config", [X_TO_Y, DECOUPLED])
async def test_what_execute_raises_and_the_end(tmp_path: Path, config: str) -> None:
    path = write_model(
        tmp_path, "ends", ENDS, config + "instance_group { count: 2 kind: KIND_CPU }" + IN_A_PROCESS
    )
    async with serving(path) as client:
        async with asyncio.timeout(30):
            if config == X_TO_Y:
                _, error_text = await client.failure("ends", {"X": ints(1)})
            else:
                [message] = [response async for response in client.stream([request("ends", {"X": ints(1)})])]
                error_text = message.error_message
        assert "odd input" in error_text
    assert (path / "1" / "finalized").read_text() == "xx"
