"""Requests of the benches, checks of their replies, and the canned replies of the bare servers."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import orjson
from google.protobuf import json_format

from bench.tally import BenchError
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2, tensor_pb2

Floats = npt.NDArray[np.float32]
GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
PREDICT_PATH = "/tensorflow.serving.PredictionService/Predict"
GRPS_PATH = "/grps.protos.v1.GrpsService/Predict"
GRPS_STREAM_PATH = "/grps.protos.v1.GrpsService/PredictStreaming"
MESSAGES = 1000
"""Messages of a stream: the number that bench/models/tokens yields."""
UNARY, STREAMED, BOTH_WAYS, REST = "unary", "streamed", "both ways", "rest"
"""Kinds of exchanges: gRPC without a stream, with a response stream, with streams in both directions; HTTP/1.1."""
HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and the reply of a server that does no work of its own."""

    path: str
    body: bytes
    reply: bytes
    check: Callable[[Mapping[str, str], bytes], None]
    """`check(headers, body)` raises BenchError for a wrong reply; the names of headers are in lower case."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers, or gRPC metadata."""
    reply_headers: dict[str, str] = field(default_factory=dict)
    messages: int = 1
    """Number of times that a stream repeats the reply."""
    kind: str = UNARY
    holds: tuple[bytes, ...] = ()
    """Parts of the reply to this request that no other reply has: id and values; over REST without whitespace."""


def tensor(rows: int, elements: int) -> Floats:
    """Return an FP32 input of shape [rows, elements], with the same values each time."""
    return np.random.default_rng(elements).random((rows, elements), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input `x...` of a model that returns it as output `y...`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes

    @property
    def output(self) -> str:
        """Name of the output."""
        return self.name.replace("x", "y")


def fp32(values: Floats, name: str = "x") -> Tensor:
    """Return an FP32 tensor."""
    return Tensor(name, "FP32", values.shape, values.tobytes())


def infer_request(model: str, values: Floats) -> pb.ModelInferRequest:
    """Return the gRPC request."""
    return _infer_request(model, [fp32(values)])


def _infer_request(model: str, tensors: Sequence[Tensor], request_id: str = "") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    return request


def infer_response(model: str, values: Floats) -> pb.ModelInferResponse:
    """Return an identity model's gRPC reply."""
    return _infer_response(model, [fp32(values)])


def _infer_response(model: str, tensors: Sequence[Tensor], request_id: str = "") -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=model, model_version="1", id=request_id)
    for tensor in tensors:
        response.outputs.add(name=tensor.output, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.raw)
    return response


def check_infer(model: str, reply: pb.ModelInferResponse, tensors: Sequence[Tensor], request_id: str = "") -> None:
    """Raise BenchError for anything but an identity model's reply."""
    described = [(output.name, output.datatype, tuple(output.shape)) for output in reply.outputs]
    wanted = [(tensor.output, tensor.datatype, tensor.shape) for tensor in tensors]
    if (reply.model_name, reply.id, described) != (model, request_id, wanted):
        raise BenchError(
            f"the reply is {reply.id!r} of {reply.model_name!r} with outputs {described}, "
            f"not {request_id!r} of {model!r} with {wanted}"
        )
    if list(reply.raw_output_contents) != [tensor.raw for tensor in tensors]:
        raise BenchError("the reply's tensors differ from the request's")


def _held(request_id: str, *parts: bytes) -> tuple[bytes, ...]:
    return (request_id.encode(), *parts) if request_id else parts


def _infer_exchange(
    model: str, tensors: Sequence[Tensor], request_id: str, request: pb.ModelInferRequest | None = None
) -> Exchange:
    def check(_: Mapping[str, str], body: bytes) -> None:
        check_infer(model, pb.ModelInferResponse.FromString(body), tensors, request_id)

    request = request or _infer_request(model, tensors, request_id)
    reply = _infer_response(model, tensors, request_id).SerializeToString()
    held = _held(request_id, *(tensor.raw for tensor in tensors))
    return Exchange(GRPC_PATH, request.SerializeToString(), reply, check, holds=held)


def grpc_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """ModelInfer with the tensor in `raw_input_contents`."""
    return _infer_exchange(model, [fp32(values)], request_id)


def contents_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """ModelInfer with the tensor in `fp32_contents`."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    given = request.inputs.add(name="x", datatype="FP32", shape=values.shape)
    given.contents.fp32_contents.extend(values.ravel().tolist())
    exchange = _infer_exchange(model, [fp32(values)], request_id, request)

    def check(_: Mapping[str, str], body: bytes) -> None:
        reply = pb.ModelInferResponse.FromString(body)
        # Some servers reply with contents to a request with contents.
        if len(reply.outputs) == 1 and not reply.raw_output_contents:
            floats = np.array(reply.outputs[0].contents.fp32_contents, np.float32)
            reply.raw_output_contents.append(floats.tobytes())
        check_infer(model, reply, [fp32(values)], request_id)

    return replace(exchange, check=check)


def two_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """ModelInfer with two tensors, the second one with other values."""
    return _infer_exchange(model, [fp32(values), fp32(values[:, :4] + 1, "x2")], request_id)


def bytes_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """ModelInfer with a BYTES tensor, one text per row."""
    texts = [" and ".join(f"{value:.2f}" for value in row[:6]).encode() for row in values]
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return _infer_exchange(model, [Tensor("x", "BYTES", (len(texts), 1), raw)], request_id)


def stream_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """The same request and reply as messages of ModelStreamInfer."""
    tensors = [fp32(values)]

    def check(_: Mapping[str, str], body: bytes) -> None:
        answer = pb.ModelStreamInferResponse.FromString(body)
        if answer.error_message:
            raise BenchError(f"the answer says {answer.error_message!r}")
        check_infer(model, answer.infer_response, tensors, request_id)

    reply = pb.ModelStreamInferResponse(infer_response=_infer_response(model, tensors, request_id))
    reply.infer_response.parameters["triton_final_response"].bool_param = True
    body = _infer_request(model, tensors, request_id).SerializeToString()
    held = _held(request_id, tensors[0].raw)
    return Exchange(STREAM_PATH, body, reply.SerializeToString(), check, kind=BOTH_WAYS, holds=held)


def predict_content_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """TensorFlow Serving's Predict with the tensor in `tensor_content`, as tf.make_tensor_proto sends it."""
    return _predict_exchange(model, values, tensor_pb2.TensorProto(tensor_content=values.tobytes()), request_id)


def predict_values_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """TensorFlow Serving's Predict with the tensor in `float_val`."""
    given = tensor_pb2.TensorProto(float_val=values.ravel().tolist())
    return _predict_exchange(model, values, given, request_id)


def _id_header(request_id: str) -> dict[str, str]:
    """Return the header with the request's id, for protocols whose messages have none."""
    return {"x-request-id": request_id} if request_id else {}


def _predict_exchange(model: str, values: Floats, given: tensor_pb2.TensorProto, request_id: str) -> Exchange:
    def check(_: Mapping[str, str], body: bytes) -> None:
        answer = predict_pb2.PredictResponse.FromString(body)
        tensors = answer.outputs.items()
        described = [
            (name, _type_name(tensor), [dim.size for dim in tensor.tensor_shape.dim]) for name, tensor in tensors
        ]
        floats = np.array(answer.outputs["y"].float_val, np.float32)
        _compare(answer.model_spec.name, model, described, floats.tobytes(), values)

    shape = {"dim": [{"size": size} for size in values.shape]}
    given.MergeFrom(tensor_pb2.TensorProto(dtype=tensor_pb2.DT_FLOAT, tensor_shape=shape))
    request = predict_pb2.PredictRequest(model_spec={"name": model}, inputs={"x": given})
    output = tensor_pb2.TensorProto(
        dtype=tensor_pb2.DT_FLOAT, tensor_shape=shape, float_val=values.ravel().tolist()
    )
    spec = {"name": model, "version": {"value": 1}, "signature_name": "serving_default"}
    reply = predict_pb2.PredictResponse(model_spec=spec, outputs={"y": output})
    return Exchange(
        PREDICT_PATH,
        request.SerializeToString(),
        reply.SerializeToString(),
        check,
        _id_header(request_id),
        holds=(values.tobytes(),),
    )


def _type_name(tensor: tensor_pb2.TensorProto) -> str:
    return "FP32" if tensor.dtype == tensor_pb2.DT_FLOAT else f"type {tensor.dtype}"


def grps_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """grps' Predict with the tensor in `flat_float32`."""

    def check(_: Mapping[str, str], body: bytes) -> None:
        _check_grps(model, body, values)

    body = _grps_request(model, values)
    headers, held = _id_header(request_id), (values.tobytes(),)
    return Exchange(GRPS_PATH, body, _grps_reply(values), check, headers, holds=held)


def grps_stream_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """grps' PredictStreaming: one request, and `MESSAGES` messages. The reply is one of them."""

    def check(_: Mapping[str, str], body: bytes) -> None:
        messages = unframed(body)
        if len(messages) != MESSAGES:
            raise BenchError(f"the stream has {len(messages)} messages, not {MESSAGES}")
        for message in messages:
            _check_grps(model, message, values)

    return Exchange(
        GRPS_STREAM_PATH,
        _grps_request(model, values),
        _grps_reply(values),
        check,
        _id_header(request_id),
        messages=MESSAGES,
        kind=STREAMED,
        holds=(values.tobytes(),),
    )


def framed(messages: Iterable[bytes]) -> bytes:
    """Return messages with gRPC's prefixes."""
    return b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)


def unframed(data: bytes) -> list[bytes]:
    """Return the messages in the result of `framed`."""
    messages, at = [], 0
    while at < len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        messages.append(data[at + 5 : end])
        at = end
    return messages


def _grps_message(name: str, values: Floats) -> grps_pb2.GrpsMessage:
    message = grps_pb2.GrpsMessage()
    message.gtensors.tensors.add(
        name=name, dtype=grps_pb2.DT_FLOAT32, shape=values.shape, flat_float32=values.ravel().tolist()
    )
    return message


def _grps_request(model: str, values: Floats) -> bytes:
    request = _grps_message("x", values)
    request.model = f"{model}-1"
    return request.SerializeToString()


def _grps_reply(values: Floats) -> bytes:
    reply = _grps_message("y", values)
    reply.status.code, reply.status.msg, reply.status.status = 200, "OK", grps_pb2.Status.SUCCESS
    return reply.SerializeToString()


def _check_grps(model: str, body: bytes, values: Floats) -> None:
    reply = grps_pb2.GrpsMessage.FromString(body)
    if reply.status.code != 200:
        raise BenchError(f"the reply says {reply.status.code} {reply.status.msg}")
    tensors = reply.gtensors.tensors
    described = [
        (tensor.name, "FP32", list(tensor.shape)) for tensor in tensors if tensor.dtype == grps_pb2.DT_FLOAT32
    ]
    floats = np.array(tensors[0].flat_float32 if described else [], np.float32)
    _compare(model, model, described, floats.tobytes(), values)


def grps_json_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """grps' predict over HTTP with the same message as JSON."""

    def check(_: Mapping[str, str], body: bytes) -> None:
        reply: grps_pb2.GrpsMessage = json_format.Parse(body, grps_pb2.GrpsMessage())
        _check_grps(model, reply.SerializeToString(), values)

    def printed(message: bytes) -> bytes:
        return json_format.MessageToJson(
            grps_pb2.GrpsMessage.FromString(message), preserving_proto_field_name=True
        ).encode()

    return Exchange(
        path="/grps/v1/infer/predict",
        headers=_id_header(request_id) | {"Content-Type": "application/json"},
        body=printed(_grps_request(model, values)),
        reply=printed(_grps_reply(values)),
        reply_headers={"Content-Type": "application/json"},
        check=check,
        kind=REST,
    )


def predict_json_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """TensorFlow Serving's REST `:predict` with rows of numbers, as doubles."""

    def check(_: Mapping[str, str], body: bytes) -> None:
        given = np.array(json.loads(body)["predictions"], np.float32)
        _compare(model, model, [("y", "FP32", list(given.shape))], given.tobytes(), values)

    return Exchange(
        path=f"/v1/models/{model}:predict",
        headers=_id_header(request_id),
        body=orjson.dumps({"instances": values.tolist()}),
        reply=orjson.dumps({"predictions": values}, option=orjson.OPT_SERIALIZE_NUMPY),
        reply_headers={"Content-Type": "application/json"},
        check=check,
        kind=REST,
        holds=(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY),),
    )


def json_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """REST with the numbers as JSON. Requests have them as a Python client formats them: as doubles."""

    def check(_: Mapping[str, str], body: bytes) -> None:
        reply = json.loads(body)
        if reply.get("id", "") != request_id:
            raise BenchError(f"the reply's id is {reply.get('id')!r}, not {request_id!r}")
        described = [(output["name"], output["datatype"], output["shape"]) for output in reply["outputs"]]
        raw = np.array(reply["outputs"][0].get("data", ()), np.float32).tobytes() if described else b""
        _compare(reply.get("model_name"), model, described, raw, values)

    x = {"name": "x", "shape": list(values.shape), "datatype": "FP32", "data": values.ravel().tolist()}
    y = {"name": "y", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel()}
    named = {"id": request_id} if request_id else {}
    reply = {"model_name": model, "model_version": "1", **named, "outputs": [y]}
    return Exchange(
        path=f"/v2/models/{model}/infer",
        headers={"Content-Type": "application/json"},
        body=orjson.dumps({**named, "inputs": [x]}),
        reply=orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY),
        reply_headers={"Content-Type": "application/json"},
        check=check,
        kind=REST,
        holds=_held(request_id, orjson.dumps(values.ravel(), option=orjson.OPT_SERIALIZE_NUMPY)),
    )


def binary_exchange(model: str, values: Floats, request_id: str = "") -> Exchange:
    """REST with the binary tensor extension, in both directions."""

    def check(headers: Mapping[str, str], body: bytes) -> None:
        split = int(headers.get(HEADER_LENGTH.lower()) or len(body))
        reply = json.loads(body[:split])
        if reply.get("id", "") != request_id:
            raise BenchError(f"the reply's id is {reply.get('id')!r}, not {request_id!r}")
        described = [(output["name"], output["datatype"], output["shape"]) for output in reply["outputs"]]
        _compare(reply.get("model_name"), model, described, body[split:], values)

    raw, shape = values.tobytes(), list(values.shape)
    size = {"binary_data_size": len(raw)}
    x = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": size}
    y = {"name": "y", "datatype": "FP32", "shape": shape, "parameters": size}
    named = {"id": request_id} if request_id else {}
    ask = orjson.dumps({**named, "inputs": [x], "parameters": {"binary_data_output": True}})
    answer = orjson.dumps({"model_name": model, "model_version": "1", **named, "outputs": [y]})
    return Exchange(
        path=f"/v2/models/{model}/infer",
        headers={"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(ask))},
        body=ask + raw,
        reply=answer + raw,
        reply_headers={"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(answer))},
        check=check,
        kind=REST,
    )


def _compare(
    name: str | None, model: str, described: list[tuple[str, str, list[int]]], raw: bytes, values: Floats
) -> None:
    """Raise BenchError unless the reply names the model, and has one output y, equal to the input."""
    wanted = [("y", "FP32", list(values.shape))]
    if name != model or described != wanted:
        raise BenchError(f"the reply is of {name!r} with outputs {described}, not of {model!r} with {wanted}")
    if raw != values.tobytes():
        raise BenchError(f"the reply's tensor ({len(raw)} bytes) differs from the request's ({values.nbytes})")
