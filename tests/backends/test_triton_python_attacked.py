"""Triton Python models that misbehave: the next request is answered all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from triton_served import DECOUPLED, SECONDS, X_TO_Y, GrpcClient, ints, request, serving, write_model

IN_A_PROCESS = 'parameters { key: "execution" value { string_value: "process" } }\n'
EITHER = pytest.mark.parametrize("execution", ["", IN_A_PROCESS], ids=["thread", "process"])
ECHO = """
def echo(request):
    x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])

def first(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]

"""
UNSPEAKABLE = """
class Unspeakable(BaseException):
    def __str__(self):
        raise ValueError("no")

class TritonPythonModel:
    def execute(self, requests):
        if first(requests[0]):
            raise Unspeakable
"""
AT_ONCE = "        return [echo(request) for request in requests]\n"
BY_SENDER = (
    "        for request in requests:\n"
    "            sender = request.get_response_sender()\n"
    "            sender.send(echo(request), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
)
UNPRINTABLE = "message: Unspeakable: <its __str__ has raised ValueError>"


async def answers(client: GrpcClient, model: str, x: int) -> list[tuple[str, int]]:
    """Errors, and how many outputs there are, of what is answered to one request on a stream."""
    async with asyncio.timeout(SECONDS):
        messages = [message async for message in client.stream([request(model, {"X": ints(x)})])]
    return [(message.error_message, len(message.infer_response.outputs)) for message in messages]


@EITHER
async def test_error_without_a_printable_text(execution: str, tmp_path: Path) -> None:
    models = [
        write_model(tmp_path, "once", ECHO + UNSPEAKABLE + AT_ONCE, X_TO_Y + execution),
        write_model(tmp_path, "many", ECHO + UNSPEAKABLE + BY_SENDER, DECOUPLED + execution),
    ]
    async with serving(*models) as client:
        code, text = await client.failure("once", {"X": ints(1)})
        assert (code, text[-len(UNPRINTABLE) :]) == (grpc.StatusCode.INTERNAL, UNPRINTABLE)
        [(text, outputs)] = await answers(client, "many", 1)
        assert (text[-len(UNPRINTABLE) :], outputs) == (UNPRINTABLE, 0)
        assert [await answers(client, name, 0) for name in ("once", "many")] == [[("", 1)], [("", 1)]]


STOPS_ITS_LOOP = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        if first(requests[0]):
            asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return [echo(request) for request in requests]
"""


@EITHER
async def test_a_coroutine_that_stops_its_loop(execution: str, tmp_path: Path) -> None:
    """The loop continues, with all that runs on it."""
    async with serving(write_model(tmp_path, "stops", ECHO + STOPS_ITS_LOOP, X_TO_Y + execution)) as client:
        for x in (1, 0, 1, 0):
            assert (await client.infer("stops", {"X": ints(x)})).outputs["Y"].tolist() == [x]


ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if first(request):
                asked = pb_utils.InferenceRequest(
                    model_name="silent", inputs=request.inputs(), requested_output_names=["Y"]
                )
                for response in asked.exec(decoupled=True):
                    sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SILENT = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        for request in requests:
            self.kept.append(request.get_response_sender())
            self.kept[-1].send(echo(request))
"""


@EITHER
async def test_who_leaves_ends_what_the_model_waits_for(execution: str, tmp_path: Path) -> None:
    """Its thread waits for another model, which never says that it has answered all."""
    models = [
        write_model(tmp_path, "asks", ECHO + ASKS, DECOUPLED + execution),
        write_model(tmp_path, "silent", ECHO + SILENT, DECOUPLED),
    ]
    async with serving(*models) as client:
        for _ in range(2):
            stream = client.stream([request("asks", {"X": ints(1)})])
            async with asyncio.timeout(SECONDS):
                assert not (await anext(stream)).error_message
                await stream.aclose()
        assert await answers(client, "asks", 0) == []
