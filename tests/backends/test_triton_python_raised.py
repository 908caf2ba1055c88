"""Whatever `execute` of a Triton Python model raises: each request has its answer, and the model continues."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from triton_served import DECOUPLED, X_TO_Y, ints, request, serving, write_model

CODE = """
class Own(BaseException):
    pass

class TritonPythonModel:
    {execute}
        for request in requests:
            if pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0] == 3:
                raise {error}
        {answer}
"""
PLAIN = """return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))]) for _ in requests
        ]"""
SENT = """for request in requests:
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""
ERRORS = [
    "GeneratorExit",
    "StopIteration(3)",
    "StopAsyncIteration",
    "asyncio.CancelledError",
    "KeyboardInterrupt",
    "SystemExit(3)",
    "Own",
]
EXECUTES = ["def execute(self, requests):", "async def execute(self, requests):"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("execute", EXECUTES)
@pytest.mark.parametrize("config", [X_TO_Y, DECOUPLED])
async def test_a_request_fails_and_the_next_is_answered(
    tmp_path: Path, config: str, execute: str, error: str
) -> None:
    answer = SENT if config == DECOUPLED else PLAIN
    code = CODE.format(execute=execute, error=error, answer=answer)
    write_model(tmp_path, "m", code, config, imports="import asyncio")
    async with serving(tmp_path) as client:
        for _ in range(2):
            messages = [
                message.error_message
                async for message in client.stream([request("m", {"X": ints(3)}), request("m", {"X": ints(1)})])
            ]
            assert sorted(map(bool, messages)) == [False, True]
        if config != DECOUPLED:
            code_, _ = await client.failure("m", {"X": ints(3)})
            assert code_ is grpc.StatusCode.INTERNAL
            assert (await client.infer("m", {"X": ints(1)})).outputs["Y"] == [1]
