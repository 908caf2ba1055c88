"""Clients for each protocol: numpy arrays in, numpy arrays out, errors as the server's own classes.

Strategy: KServe V2 and TensorFlow Serving over gRPC by `triglot.client`, the others by plain messages and JSON, as
any client sends them; none has the server's codecs. Several threads may use a client at a time.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPMessage, HTTPSConnection
from types import TracebackType
from typing import Any, Final, NoReturn, Self
from urllib.parse import urlsplit

import numpy as np
from google.protobuf import json_format

from triglot import client
from triglot.core.errors import Code, error_of
from triglot.core.http import CODE_OF
from triglot.core.tensor import (
    DATATYPES,
    Array,
    array_over,
    bytes_elements,
    datatype_of,
    object_array,
    raw_buffer,
    unpack_bytes,
)
from triglot.core.types import ParameterValue
from triglot.inline import ServedAt
from triglot.pb.grps import grps_pb2

SECONDS: Final = 60.0
"""Limit of a call, unless a client has its own."""
Inputs = Mapping[str, Any]
"""Arrays by name, or what `numpy.asarray` takes: their dtypes are those that are sent."""
Outputs = dict[str, Array]
"""Arrays by name; BYTES are object arrays of `bytes`."""


class Client(ABC):
    """Calls models over one protocol, for a block: `with KServeGrpc(server) as client`.

    `server`: a server of `triglot.testing.serve`, or an address: `127.0.0.1:8001` for gRPC, a URL for REST.
    `timeout`: limit of each call in seconds. `headers`: what is sent with each call, such as a token.

    Every call raises the `ServingError` that the server answered with.
    """

    def __init__(
        self, server: ServedAt | str, *, timeout: float = SECONDS, headers: Mapping[str, str] | None = None
    ) -> None:
        self._address = server if isinstance(server, str) else self._address_of(server)
        self._timeout = timeout
        self._headers = dict(headers or {})

    @staticmethod
    @abstractmethod
    def _address_of(server: ServedAt) -> str:
        """Return the address that this protocol has."""

    @abstractmethod
    def infer(self, model: str, inputs: Inputs, *, version: int = 0) -> Outputs:
        """Call a model and return its outputs. `version`: 0 for the one that the server chooses."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close.
        """Close the connection, if the client keeps one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GrpcClient(Client):
    """A client with a gRPC connection of its own, whose calls are not tried again."""

    _protocol = "kserve"

    def __init__(
        self, server: ServedAt | str, *, timeout: float = SECONDS, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(server, timeout=timeout, headers=headers)
        self._client = client.Client(
            self._address,
            protocol=self._protocol,
            timeout=timeout,
            headers=headers,
            retries=client.Retries(attempts=1),
        )

    @staticmethod
    def _address_of(server: ServedAt) -> str:
        return server.grpc_address

    def call(self, method: str, request: Any, response: Any) -> Any:
        """Make a unary call: `method` is `/package.Service/Method`, `response` the class of its message."""
        return response.FromString(self._client.call(method, request.SerializeToString()))

    def stream(self, method: str, requests: Sequence[Any], response: Any) -> Iterator[Any]:
        """Send all requests of a bidirectional stream, and yield its responses."""
        messages = [request.SerializeToString() for request in requests]
        return map(response.FromString, self._client.call_stream(method, messages))

    def close(self) -> None:
        """As in the base class."""
        self._client.close()


class RestClient(Client):
    """A client with an HTTP connection for each call."""

    @staticmethod
    def _address_of(server: ServedAt) -> str:
        return server.url

    def send(
        self, verb: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, HTTPMessage, bytes]:
        """Send a request; returns status, headers and body of the response. `path` is sent as it is."""
        url = urlsplit(self._address)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.netloc, timeout=self._timeout)
        try:
            connection.request(verb, path, body or None, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """Return the JSON at a path. Raise the `ServingError` of another status than 200."""
        return _json(*self.send("GET", path))

    def post(self, path: str, body: object) -> Any:
        """Send JSON and return that of the response, None for none. Raise as `get`."""
        return _json(*self.send("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}))


def _json(status: int, _: HTTPMessage, body: bytes) -> Any:
    if status != 200:
        _raise_status(status, body)
    return json.loads(body) if body else None


def _raise(code: Code, text: str) -> NoReturn:
    raise error_of({"code": code, "message": text, "retry_after": None}) from None


def _raise_status(status: int, body: bytes) -> NoReturn:
    try:
        text = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        text = body.decode(errors="replace")
    _raise(_code(status), text)


def _code(status: int) -> Code:
    return CODE_OF.get(status, Code.INVALID_ARGUMENT if status < 500 else Code.INTERNAL)


def _arrays(inputs: Inputs) -> Iterator[tuple[str, str, Array]]:
    """Yield name, datatype and array of each input."""
    for name, value in inputs.items():
        array = np.asarray(value)
        yield name, datatype_of(array), array


def _raw(array: Array) -> bytes:
    """Return the raw bytes of a tensor; `bytes` would take one integer for a length."""
    buffer = raw_buffer(array)
    return buffer.tobytes() if isinstance(buffer, np.ndarray) else bytes(buffer)


def _array(data: bytes, datatype: str, shape: Sequence[int]) -> Array:
    """Return the tensor with these raw bytes."""
    if datatype == "BYTES":
        return object_array(unpack_bytes(data, int(np.prod(shape, dtype=np.int64))), shape)
    return array_over(data, DATATYPES[datatype].dtype, shape)


def _from_elements(elements: list[Any], datatype: str, shape: Sequence[int]) -> Array:
    """Return the tensor with these elements; texts are sent as UTF-8."""
    if datatype == "BYTES":
        return object_array([item.encode() if isinstance(item, str) else item for item in elements], shape)
    return np.array(elements, DATATYPES[datatype].dtype).reshape(shape)


def _field_of(name: str, datatype: str, fields: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return a protocol's name of a datatype, and the field of its elements."""
    if datatype not in fields:
        raise TypeError(f"{name}: expected a datatype of the protocol, {', '.join(fields)}, got {datatype}")
    return fields[datatype]


# --- KServe V2 ---


class KServeGrpc(GrpcClient):
    """KServe V2 over gRPC, with raw tensors."""

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int = 0,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Outputs:
        """As in the base class; `parameters` are those of the request."""
        return self._client.infer(model, inputs, version=version, parameters=parameters or {})

    def infer_stream(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int = 0,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Iterator[Outputs]:
        """Yield the outputs of each response of a decoupled model."""
        return self._client.stream(model, inputs, version=version, parameters=parameters or {})


class KServeRest(RestClient):
    """KServe V2 over REST, with binary tensors."""

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int = 0,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Outputs:
        """As in the base class; `parameters` are those of the request."""
        tensors, parts = [], []
        for name, datatype, array in _arrays(inputs):
            data = _raw(array)
            size = {"binary_data_size": len(data)}
            tensors.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": size})
            parts.append(data)
        head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True, **(parameters or {})}})
        path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
        length = "Inference-Header-Content-Length"
        body = b"".join([head.encode(), *parts])
        status, headers, reply = self.send("POST", path, body, {length: str(len(head.encode()))})
        if status != 200:
            _raise_status(status, reply)
        at = int(headers.get(length, len(reply)))
        outputs = {}
        for output in json.loads(reply[:at])["outputs"]:
            name, datatype, shape = output["name"], output["datatype"], output["shape"]
            if "data" in output:  # Some servers send JSON all the same.
                outputs[name] = _from_elements(output["data"], datatype, shape)
                continue
            end = at + output["parameters"]["binary_data_size"]
            outputs[name], at = _array(reply[at:end], datatype, shape), end
        return outputs


# --- TensorFlow Serving ---

_TENSORFLOW_DATATYPES: Final = {
    "DT_BOOL": "BOOL",
    "DT_UINT8": "UINT8",
    "DT_UINT16": "UINT16",
    "DT_UINT32": "UINT32",
    "DT_UINT64": "UINT64",
    "DT_INT8": "INT8",
    "DT_INT16": "INT16",
    "DT_INT32": "INT32",
    "DT_INT64": "INT64",
    "DT_HALF": "FP16",
    "DT_FLOAT": "FP32",
    "DT_DOUBLE": "FP64",
    "DT_BFLOAT16": "BF16",
    "DT_STRING": "BYTES",
}


class TensorFlowGrpc(GrpcClient):
    """TensorFlow Serving's Predict over gRPC."""

    _protocol = "tensorflow_serving"

    def infer(self, model: str, inputs: Inputs, *, version: int = 0, signature: str = "") -> Outputs:
        """As in the base class; `signature`: "" for `serving_default`."""
        return self._client.infer(model, inputs, version=version, signature=signature)


class TensorFlowRest(RestClient):
    """TensorFlow Serving's REST, in columns; names and dtypes of outputs are those of the model's metadata."""

    def infer(
        self, model: str, inputs: Inputs, *, version: int = 0, signature: str = "serving_default"
    ) -> Outputs:
        """As in the base class, for a signature."""
        path = f"/v1/models/{model}{f'/versions/{version}' if version else ''}"
        columns = {name: _json_elements(name, datatype, array) for name, datatype, array in _arrays(inputs)}
        results = self.post(f"{path}:predict", {"inputs": columns, "signature_name": signature})["outputs"]
        signatures = self.get(f"{path}/metadata")["metadata"]["signature_def"]["signature_def"]
        declared = signatures[signature]["outputs"]
        if len(declared) == 1:  # Without its name.
            results = {next(iter(declared)): results}
        return {name: _from_json(values, declared[name]["dtype"]) for name, values in results.items()}


def _json_elements(name: str, datatype: str, array: Array) -> Any:
    """Return an array as TensorFlow Serving's JSON, with bytes in base64."""
    if datatype in ("UINT16", "FP16", "BF16"):
        raise TypeError(f"{name}: TensorFlow Serving's REST has no JSON of {datatype}")
    if datatype == "BYTES":
        elements = np.empty(array.size, object)
        elements[:] = [{"b64": base64.b64encode(item).decode()} for item in bytes_elements(array.astype(object))]
        return elements.reshape(array.shape).tolist()
    return array.tolist()


def _from_json(values: Any, dtype: str) -> Array:
    if dtype != "DT_STRING":
        return np.array(values, DATATYPES[_TENSORFLOW_DATATYPES[dtype]].dtype)
    array = np.array(values, object)
    elements = [
        base64.b64decode(item["b64"]) if isinstance(item, dict) else item.encode()
        for item in array.ravel().tolist()
    ]
    return object_array(elements, array.shape)


# --- grps ---

GRPS: Final = "/grps.protos.v1.GrpsService/"
GRPS_PREDICT: Final = "/grps/v1/infer/predict"
_GRPS_FIELDS: Final = {
    "UINT8": ("DT_UINT8", "flat_uint8"),
    "INT8": ("DT_INT8", "flat_int8"),
    "INT16": ("DT_INT16", "flat_int16"),
    "INT32": ("DT_INT32", "flat_int32"),
    "INT64": ("DT_INT64", "flat_int64"),
    "FP16": ("DT_FLOAT16", "flat_float16"),
    "FP32": ("DT_FLOAT32", "flat_float32"),
    "FP64": ("DT_FLOAT64", "flat_float64"),
    "BYTES": ("DT_STRING", "flat_string"),
}
"""By datatype: grps' name, and the field of its elements."""
_GRPS_DATATYPES: Final = {name: datatype for datatype, (name, _) in _GRPS_FIELDS.items()}


class GrpsGrpc(GrpcClient):
    """grps' Predict over gRPC, with tensors."""

    def infer(self, model: str, inputs: Inputs, *, version: int = 0) -> Outputs:
        """As in the base class."""
        request = _grps_message(model, inputs, version)
        return _grps_outputs(self.call(GRPS + "Predict", request, grps_pb2.GrpsMessage))

    def infer_stream(self, model: str, inputs: Inputs, *, version: int = 0) -> Iterator[Outputs]:
        """Yield the outputs of each response of a decoupled model."""
        answers = self.stream(
            GRPS + "PredictStreaming", [_grps_message(model, inputs, version)], grps_pb2.GrpsMessage
        )
        return map(_grps_outputs, answers)


class GrpsHttp(RestClient):
    """grps' HTTP, with tensors."""

    def infer(self, model: str, inputs: Inputs, *, version: int = 0) -> Outputs:
        """As in the base class."""
        message = _grps_message(model, inputs, version)
        text = json_format.MessageToJson(message, preserving_proto_field_name=True)
        status, _, reply = self.send("POST", GRPS_PREDICT, text.encode(), {"Content-Type": "application/json"})
        try:
            return _grps_outputs(json_format.Parse(reply, grps_pb2.GrpsMessage()))
        except json_format.ParseError:
            _raise_status(status, reply)


def _grps_message(model: str, inputs: Inputs, version: int) -> grps_pb2.GrpsMessage:
    message = grps_pb2.GrpsMessage(model=f"{model}-{version}" if version else model)
    message.gtensors.SetInParent()
    for name, datatype, array in _arrays(inputs):
        dtype, field = _field_of(name, datatype, _GRPS_FIELDS)
        elements: Any = array.ravel().tolist()
        if datatype == "BYTES":
            elements = [item.decode() for item in bytes_elements(array.astype(object))]
        message.gtensors.tensors.add(
            name=name, dtype=getattr(grps_pb2, dtype), shape=array.shape, **{field: elements}
        )
    return message


def _grps_outputs(message: grps_pb2.GrpsMessage) -> Outputs:
    if message.status.code != 200:
        _raise(_code(message.status.code), message.status.msg)
    return {tensor.name: _grps_array(tensor) for tensor in message.gtensors.tensors}


def _grps_array(tensor: grps_pb2.GenericTensor) -> Array:
    datatype = _GRPS_DATATYPES[grps_pb2.DataType.Name(tensor.dtype)]
    return _from_elements(list(getattr(tensor, _GRPS_FIELDS[datatype][1])), datatype, tensor.shape)


CLIENTS: Final[Mapping[str, Callable[[ServedAt], Client]]] = {
    "kserve_grpc": KServeGrpc,
    "kserve_rest": KServeRest,
    "tensorflow_grpc": TensorFlowGrpc,
    "tensorflow_rest": TensorFlowRest,
    "grps_grpc": GrpsGrpc,
    "grps_http": GrpsHttp,
}
"""The client of each protocol, by name."""
