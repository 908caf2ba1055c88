"""Triton Python models whose clients open hundreds of requests on one stream, or read none of their responses.

Checked on tritonserver 2.51: requests are taken in as they arrive, and `InferenceResponseSender.send` waits for no
client.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.backends.triton_served import ints, request, serving, write_model
from triglot.pb.kserve import inference_pb2 as pb

MANY = 300
CHAT = """
model_transaction_policy { decoupled: true }
input [ { name: "ID" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "STOP" data_type: TYPE_BOOL dims: [ 1 ] } ]
output [ { name: "TOKEN" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
CHAT_CODE = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.stops = {}

    KIND execute(self, requests):
        for request in requests:
            ident, stop = (pb_utils.get_input_tensor_by_name(request, n).as_numpy().item() for n in ("ID", "STOP"))
            sender = request.get_response_sender()
            if stop:
                sender.send(flags=FINAL)
                self.stops.pop(ident).send(self.token(1), FINAL)
            else:
                self.stops[ident] = sender
                sender.send(self.token(0))

    def token(self, number):
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOKEN", np.array([number], np.int32))])
"""
SUMS = """
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ]
  STRATEGY
}
"""
SUMS_CODE = """
NAMES = "X", "START", "CORRID"


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            x, start, of = (pb_utils.get_input_tensor_by_name(request, n).as_numpy().item() for n in NAMES)
            self.sums[of] = x + (0 if start else self.sums[of])
            y = np.array([[self.sums[of]]], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return responses
"""


def chat(number: int, *, stop: bool = False) -> pb.ModelInferRequest:
    return request("chat", {"ID": ints(number), "STOP": np.array([stop])}, id="stop" if stop else str(number))


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(("execution", "transport"), [("thread", "h2"), ("thread", "aio"), ("process", "h2")])
async def test_request_during_hundreds_of_generations_takes_effect(
    tmp_path: Path, kind: str, execution: str, transport: str
) -> None:
    config = f'{CHAT}parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    write_model(tmp_path, "chat", CHAT_CODE.replace("KIND", kind), config)
    async with serving(tmp_path, grpc_transport=transport) as client:
        call = client.open_stream(timeout=60)
        for number in range(MANY):
            await call.write(chat(number))
        first = [await call.read() for _ in range(MANY)]
        assert {response.infer_response.id for response in first} == {str(number) for number in range(MANY)}
        await call.write(chat(7, stop=True))
        stopped = await call.read()
        assert (stopped.infer_response.id, stopped.error_message) == ("7", "")
        call.cancel()


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 8 }"])
@pytest.mark.parametrize(("half_closes", "transport"), [(False, "h2"), (True, "h2"), (True, "aio")])
async def test_more_sequences_than_slots_lose_no_request(
    tmp_path: Path, strategy: str, half_closes: bool, transport: str
) -> None:
    write_model(tmp_path, "sums", SUMS_CODE, SUMS.replace("STRATEGY", strategy))
    sequences, steps = 50, 6
    async with serving(tmp_path, grpc_transport=transport) as client:
        call = client.open_stream(timeout=60)
        for step in range(steps):
            for number in range(1, sequences + 1):
                flags = {"sequence_id": number, "sequence_start": not step, "sequence_end": step == steps - 1}
                sent = request("sums", {"X": ints(number)[None]}, id=str(number), parameters=flags)
                await call.write(sent)
        if half_closes:
            await call.done_writing()
        sums: dict[str, list[int]] = {}
        for _ in range(sequences * steps):
            answer = await call.read()
            assert not answer.error_message
            found = np.frombuffer(answer.infer_response.raw_output_contents[0], np.int32).item()
            sums.setdefault(answer.infer_response.id, []).append(found)
        if half_closes:
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        call.cancel()
    assert sums == {
        str(index): [index * step for step in range(1, steps + 1)] for index in range(1, sequences + 1)
    }
