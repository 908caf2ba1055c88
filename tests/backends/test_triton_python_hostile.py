"""Triton Python models whose code does what none should: the next request is answered all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.backends.triton_served import (
    DECOUPLED,
    SECONDS,
    X_TO_Y,
    GrpcClient,
    ints,
    reply,
    request,
    serving,
    write_model,
)
from triglot import testing
from triglot.core.errors import ModelLoadError

HEAD = """
class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class MuteBase(BaseException):
    def __str__(self):
        raise ValueError("no text")


class Nameless(triglot.ServingError):
    def __init__(self):
        pass


def x_of(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value], np.int32))])


def answered(requests, value):
    if not decoupled:
        return [response(value) for _ in requests]
    for request in requests:
        request.get_response_sender().send(response(value), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

"""
IN_A_PROCESS = 'parameters { key: "execution" value { string_value: "process" } }\n'
EITHER = pytest.mark.parametrize("execution", ["", IN_A_PROCESS], ids=["thread", "process"])
MODES = pytest.mark.parametrize("kind", ["def", "async def"])
DECOUPLED_OR_NOT = pytest.mark.parametrize("decoupled", [False, True], ids=["", "decoupled"])


def write(
    folder: Path,
    execute: str,
    *,
    kind: str = "def",
    decoupled: bool,
    more: str = "",
    name: str = "m",
    own: str = "",
) -> Path:
    """A model; `own`: further methods of its class."""
    body = "".join(f"        {line}\n" for line in execute.splitlines())
    head = f"{HEAD}\ndecoupled = {decoupled}\n\n\n"
    code = f"{head}class TritonPythonModel:\n    {kind} execute(self, requests):\n{body}{own}"
    config = (DECOUPLED if decoupled else X_TO_Y) + more
    return write_model(folder, name, code, config, imports="import asyncio\n\nimport triglot")


async def outcome(client: GrpcClient, x: int) -> Any:
    """The value of a request's one answer, or the text of its error."""
    async with asyncio.timeout(SECONDS):
        [message] = [response async for response in client.stream([request("m", {"X": ints(x)})])]
    if message.error_message:
        return message.error_message
    return reply(message.infer_response).outputs["Y"].item()


FAILED = "Failed to process the request(s) for model instance 'm_0_0', message:"
RAISED = {
    "GeneratorExit": "",
    "StopIteration(3)": "",
    "StopAsyncIteration": "",
    "asyncio.CancelledError": "",
    "KeyboardInterrupt": "",
    "SystemExit(3)": "",
    "Own": "",
    "Mute": f"{FAILED} Mute: <its __str__ has raised ValueError>",
    "MuteBase": "message: MuteBase: <its __str__ has raised ValueError>",
    "Nameless": f"{FAILED} Nameless: ",
}
"""What code raises, and what the error has to end with."""


@MODES
@DECOUPLED_OR_NOT
@pytest.mark.parametrize(
    ("error", "execution"),
    [*((error, "") for error in RAISED), ("MuteBase", IN_A_PROCESS)],
    ids=[*RAISED, "MuteBase in a process"],
)
async def test_whatever_execute_raises(
    tmp_path: Path, kind: str, decoupled: bool, error: str, execution: str
) -> None:
    """Each request has its answer, and the model continues."""
    execute = (
        f"for one in requests:\n    if x_of(one)[0] < 0:\n        raise {error}\nreturn answered(requests, 1)"
    )
    write(tmp_path, execute, kind=kind, decoupled=decoupled, more=execution)
    async with serving(tmp_path) as client:
        for _ in range(2):
            asked = [request("m", {"X": ints(x)}) for x in (-1, 1)]
            texts = sorted([message.error_message async for message in client.stream(asked)])
            assert [bool(text) for text in texts] == [False, True]
            assert texts[1].endswith(RAISED[error])
            assert await outcome(client, 1) == 1
        if not decoupled:
            code, text = await client.failure("m", {"X": ints(-1)})
            assert (code, text.endswith(RAISED[error])) == (grpc.StatusCode.INTERNAL, True)
            assert (await client.infer("m", {"X": ints(1)})).outputs["Y"] == [1]


@DECOUPLED_OR_NOT
async def test_an_initialize_whose_exception_has_no_text(
    tmp_path: Path, decoupled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = "\n    def initialize(self, args):\n        raise Mute()\n"
    file = write(tmp_path, "pass", decoupled=decoupled, own=own) / "1" / "model.py"
    with pytest.raises(ModelLoadError):
        async with asyncio.timeout(SECONDS), testing.serve(tmp_path):
            pass
    line = len(file.read_text().splitlines())
    assert f"{file}:{line}: Mute: <its __str__ has raised ValueError>" in caplog.text


@pytest.mark.parametrize(
    ("decoupled", "end", "execution"),
    [
        (False, "loop.stop()", ""),
        (True, "loop.stop()", ""),
        (False, "loop.stop()", IN_A_PROCESS),
        (False, "loop.stop()\n    loop.call_soon(loop.close)", ""),
        (True, "loop.stop()\n    loop.call_soon(loop.close)", ""),
    ],
)
async def test_a_coroutine_that_ends_its_loop(
    tmp_path: Path, decoupled: bool, end: str, execution: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop continues, with all that runs on it."""
    execute = f"""if x_of(requests[0])[0] < 0:
    loop = asyncio.get_running_loop()
    {end}
    await asyncio.sleep(0)
await asyncio.sleep(0)
return answered(requests, 1)"""
    write(tmp_path, execute, kind="async def", decoupled=decoupled, more=execution)
    async with serving(tmp_path) as client:
        for x in (1, -1, 1, -1, 1):
            assert await outcome(client, x) == 1
    if not execution:
        assert "m_0_0 loop: the model's code stopped its event loop; the loop continues" in caplog.text


CALLS_ITSELF = """if x_of(requests[0])[0] == 0:
    return answered(requests, 1)
again = pb_utils.InferenceRequest(model_name="m", inputs=[pb_utils.Tensor("X", x_of(requests[0]) - 1)])
{ask}
error = [one.error() for one in answers if one.has_error()]
if not error:
    return answered(requests, 1)
answer = pb_utils.InferenceResponse(error=error[0])
requests[0].get_response_sender().send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""


@pytest.mark.parametrize("instances", [1, 2])
async def test_a_decoupled_model_that_calls_itself(tmp_path: Path, instances: int) -> None:
    """Its `execute` holds the thread of an instance up."""
    group = f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
    write(tmp_path, CALLS_ITSELF.format(ask="answers = again.exec(decoupled=True)"), decoupled=True, more=group)
    async with serving(tmp_path) as client:
        for _ in range(2):
            assert await outcome(client, instances - 1) == 1
            outcome_text = await outcome(client, instances)
            assert f"the call would deadlock: {'m -> ' * instances}m, and every instance of 'm'" in outcome_text


async def test_a_decoupled_coroutine_may_call_itself(tmp_path: Path) -> None:
    """It holds nothing up."""
    ask = "answers = [one async for one in await again.async_exec(decoupled=True)]"
    write(tmp_path, CALLS_ITSELF.format(ask=ask), kind="async def", decoupled=True)
    async with serving(tmp_path) as client:
        assert await outcome(client, 3) == 1


ASKS = """for one in requests:
    sender = one.get_response_sender()
    if x_of(one)[0]:
        asked = pb_utils.InferenceRequest(
            model_name="silent", inputs=one.inputs(), requested_output_names=["Y"]
        )
        for answer in asked.exec(decoupled=True):
            sender.send(answer)
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""
SILENT = """for one in requests:
    kept.append(one.get_response_sender())
    kept[-1].send(response(1))"""


@EITHER
async def test_who_leaves_ends_what_the_model_waits_for(execution: str, tmp_path: Path) -> None:
    """Its thread waits for another model, which never says that it has answered all."""
    write(tmp_path, ASKS, decoupled=True, more=execution)
    write(tmp_path, SILENT, decoupled=True, name="silent", own="\n\nkept = []\n")
    async with serving(tmp_path) as client:
        for _ in range(2):
            stream = client.stream([request("m", {"X": ints(1)})])
            async with asyncio.timeout(SECONDS):
                assert not (await anext(stream)).error_message
                await stream.aclose()
        async with asyncio.timeout(SECONDS):
            assert [message async for message in client.stream([request("m", {"X": ints(0)})])] == []
