"""Triton Python models whose code does what none should: the next request is served all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton_served import (
    DECOUPLED,
    SECONDS,
    X_TO_Y,
    GrpcClient,
    in_common,
    ints,
    reply,
    request,
    serving,
    write_model,
)

from triglot import testing
from triglot.core.errors import ModelLoadError

HEAD = """
import asyncio
import probe


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class Nameless(triglot.ServingError):
    def __init__(self):
        pass


def x_of(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value], np.int32))])


def answered(request, value):
    if decoupled:
        request.get_response_sender().send(response(value), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
    return [response(value)]

"""


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return in_common(monkeypatch)


def write(folder: Path, execute: str, *, kind: str = "def", decoupled: bool, more: str = "") -> Path:
    body = "".join(f"        {line}\n" for line in execute.splitlines())
    head = f"{HEAD}\ndecoupled = {decoupled}\n\n\n"
    code = f"{head}class TritonPythonModel:\n    {kind} execute(self, requests):\n{body}"
    config = (DECOUPLED if decoupled else X_TO_Y) + more
    return write_model(folder, "m", code, config, imports="import triglot")


async def outcome(client: GrpcClient, x: int) -> Any:
    """The value of a request's one answer, or the text of its error."""
    async with asyncio.timeout(SECONDS):
        [message] = [response async for response in client.stream([request("m", {"X": ints(x)})])]
    if message.error_message:
        return message.error_message
    return reply(message.infer_response).outputs["Y"].item()


async def not_served(folder: Path) -> None:
    with pytest.raises(ModelLoadError):
        async with asyncio.timeout(SECONDS), testing.serve(folder):
            pass


MODES = pytest.mark.parametrize(
    ("kind", "decoupled"),
    [("def", False), ("async def", False), ("def", True), ("async def", True)],
)


@MODES
@pytest.mark.parametrize("error", ["Mute", "Nameless"])
async def test_exceptions_without_a_text(
    tmp_path: Path, probe: SimpleNamespace, kind: str, decoupled: bool, error: str
) -> None:
    write(
        tmp_path,
        f"if x_of(requests[0])[0] < 0:\n    raise {error}()\nreturn answered(requests[0], 1)",
        kind=kind,
        decoupled=decoupled,
    )
    async with serving(tmp_path) as client:
        for _ in range(2):
            outcome_text = await outcome(client, -1)
            assert outcome_text == (
                f"Failed to process the request(s) for model instance 'm_0_0', message: {error}: "
                + ("<its __str__ has raised ValueError>" if error == "Mute" else "")
            )
            assert await outcome(client, 1) == 1


@pytest.mark.parametrize("decoupled", [False, True])
async def test_an_initialize_whose_exception_has_no_text(
    tmp_path: Path, probe: SimpleNamespace, decoupled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, "pass", decoupled=decoupled) / "1" / "model.py"
    file.write_text(f"{file.read_text()}\n    def initialize(self, args):\n        raise Mute()\n")
    line = len(file.read_text().splitlines())
    await not_served(tmp_path)
    assert f"{file}:{line}: Mute: <its __str__ has raised ValueError>" in caplog.text


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("end", ["loop.stop()", "loop.stop()\n    loop.call_soon(loop.close)"])
async def test_a_coroutine_that_ends_its_loop(
    tmp_path: Path, probe: SimpleNamespace, decoupled: bool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    execute = f"""if x_of(requests[0])[0] < 0:
    loop = asyncio.get_running_loop()
    {end}
    await asyncio.sleep(0)
await asyncio.sleep(0)
return answered(requests[0], 1)"""
    write(tmp_path, execute, kind="async def", decoupled=decoupled)
    async with serving(tmp_path) as client:
        for x in (1, -1, 1, -1, 1):
            assert await outcome(client, x) == 1
    assert "m_0_0 loop: the model's code stopped its event loop; the loop continues" in caplog.text


CALLS_ITSELF = """if x_of(requests[0])[0] == 0:
    return answered(requests[0], 1)
again = pb_utils.InferenceRequest(model_name="m", inputs=[pb_utils.Tensor("X", x_of(requests[0]) - 1)])
{ask}
error = [one.error() for one in answers if one.has_error()]
if not error:
    return answered(requests[0], 1)
answer = pb_utils.InferenceResponse(error=error[0])
requests[0].get_response_sender().send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""


@pytest.mark.parametrize("instances", [1, 2])
async def test_a_decoupled_model_that_calls_itself(tmp_path: Path, probe: SimpleNamespace, instances: int) -> None:
    """Its `execute` holds the thread of an instance up."""
    group = f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
    write(tmp_path, CALLS_ITSELF.format(ask="answers = again.exec(decoupled=True)"), decoupled=True, more=group)
    async with serving(tmp_path) as client:
        for _ in range(2):
            assert await outcome(client, instances - 1) == 1
            outcome_text = await outcome(client, instances)
            assert f"the call would deadlock: {'m -> ' * instances}m, and every instance of 'm'" in outcome_text


async def test_a_decoupled_coroutine_may_call_itself(tmp_path: Path, probe: SimpleNamespace) -> None:
    """It holds nothing up."""
    ask = "answers = [one async for one in await again.async_exec(decoupled=True)]"
    write(tmp_path, CALLS_ITSELF.format(ask=ask), kind="async def", decoupled=True)
    async with serving(tmp_path) as client:
        assert await outcome(client, 3) == 1
