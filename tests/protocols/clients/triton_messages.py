"""tritonclient's own protobuf classes at work: one JSON object in, one out, all bytes in hex.

    python triton_messages.py < job.json

`tensors` (name, datatype, shape, raw) become a request made by tritonclient, in `request`. Each of `requests` and
`responses` (serialized messages) is read; the messages come back as tritonclient writes them, in
`written`, and the responses' outputs as it hands them to its user, in `outputs`.
"""

# Written for an environment that has no types.
# mypy: ignore-errors

import json
import sys

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult, service_pb2
from tritonclient.grpc._utils import _get_inference_request
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype


def array_of(tensor):
    raw = bytes.fromhex(tensor["raw"])
    if tensor["datatype"] == "BYTES":
        return deserialize_bytes_tensor(raw).reshape(tensor["shape"])
    return np.frombuffer(raw, triton_to_np_dtype(tensor["datatype"])).reshape(tensor["shape"])


def input_of(tensor):
    infer_input = InferInput(tensor["name"], tensor["shape"], tensor["datatype"])
    infer_input.set_data_from_numpy(array_of(tensor))
    return infer_input


def request_of(job):
    outputs = [InferRequestedOutput(name) for name in job["outputs"]]
    inputs = [input_of(tensor) for tensor in job["tensors"]]
    request = _get_inference_request(
        model_name="m",
        inputs=inputs,
        model_version="3",
        request_id="7",
        outputs=outputs,
        sequence_id=5,
        sequence_start=True,
        sequence_end=False,
        priority=2,
        timeout=1000,
        parameters={"k": "v"},
    )
    return request.SerializeToString().hex()


def outputs_of(wire):
    result = InferResult(service_pb2.ModelInferResponse.FromString(wire))
    outputs = []
    for output in result.get_response().outputs:
        array = result.as_numpy(output.name)
        elements = (
            [element.hex() for element in array.ravel()] if output.datatype == "BYTES" else array.tobytes().hex()
        )
        outputs.append([output.name, output.datatype, list(array.shape), elements])
    return outputs


def main():
    job = json.load(sys.stdin)
    requests = [bytes.fromhex(wire) for wire in job["requests"]]
    responses = [bytes.fromhex(wire) for wire in job["responses"]]
    written = [service_pb2.ModelInferRequest.FromString(wire) for wire in requests]
    written += [service_pb2.ModelInferResponse.FromString(wire) for wire in responses]
    answer = {
        "request": request_of(job),
        "written": [message.SerializeToString().hex() for message in written],
        "outputs": [outputs_of(wire) for wire in responses],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
