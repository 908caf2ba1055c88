"""Two tensors of one name in a Triton Python model's response, or in a request that it makes, are an error."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.backends.triton_served import DECOUPLED, X_TO_Y, ints, request, serving, write_model

TWO = X_TO_Y + 'output [ { name: "Z" data_type: TYPE_INT32 dims: [ -1 ] } ]\n'
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }\n'
BATCHED = "max_batch_size: 4\ndynamic_batching { }\n"
HEAD = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(request):
    x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    names = {NAMES}[x.flat[0]]
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, x) for name in names])


class TritonPythonModel:
"""
RETURNED = """
    def execute(self, requests):
        return [response(request) for request in requests]
"""
SENT = """
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(response(request), FINAL)
"""
COROUTINE = SENT.replace("def execute", "async def execute")


@pytest.mark.parametrize(
    ("execute", "config", "names", "twice"),
    [
        (RETURNED, X_TO_Y, ["Y", "Y"], "Y"),
        (RETURNED, X_TO_Y + PROCESS, ["Y", "Y"], "Y"),
        (RETURNED, X_TO_Y + BATCHED, ["Y", "Y"], "Y"),
        (RETURNED, TWO, ["Z", "Y", "Z", "Z"], "Z"),
        (RETURNED, X_TO_Y, ["Y", "other", "other"], "other"),
        (SENT, X_TO_Y, ["Y", "Y"], "Y"),
        (SENT, DECOUPLED, ["Y", "Y"], "Y"),
        (SENT, DECOUPLED + PROCESS, ["Y", "Y"], "Y"),
        (COROUTINE, DECOUPLED, ["Y", "Y"], "Y"),
    ],
)
async def test_a_response_with_two_tensors_of_one_name_is_an_error(
    tmp_path: Path, execute: str, config: str, names: list[str], twice: str
) -> None:
    once = list(dict.fromkeys(names))
    write_model(tmp_path, "m", HEAD.replace("{NAMES}", str([once, names])) + execute, config)
    rows = (lambda value: ints(value)[None]) if "max_batch_size" in config else ints
    async with serving(tmp_path) as client:
        requests = [request("m", {"X": rows(value)}, id=str(value)) for value in (0, 1, 0)]
        found = [
            (response.infer_response.id, response.error_message) async for response in client.stream(requests)
        ]
        times = names.count(twice)
        wrong = f"output '{twice}': expected one tensor in the model's response, got {times}"
        assert sorted(found) == [("0", ""), ("0", ""), ("1", wrong)]
        if config not in (DECOUPLED, DECOUPLED + PROCESS):
            code, text = await client.failure("m", {"X": rows(1)})
            assert code is grpc.StatusCode.INTERNAL
            assert wrong in text


async def test_a_model_cannot_make_a_request_with_two_inputs_of_one_name(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X")
        pb_utils.InferenceRequest(model_name="m", requested_output_names=["Y"], inputs=[x, x]).exec()
"""
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        assert "input 'X' already exists in request" in (await client.failure("m", {"X": ints(1)}))[1]
