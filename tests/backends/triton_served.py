"""Triton Python models behind a server, called over gRPC."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

import triglot
from triglot import testing
from triglot.core.tensor import DATATYPES, byte_length, datatype_of, object_array, raw_buffer, unpack_bytes
from triglot.pb.kserve import inference_pb2 as pb

SECONDS = 20
MODELS = Path(__file__).resolve().parents[1] / "models_triton_python"
SERVICE = "/inference.GRPCInferenceService/"


@dataclass(frozen=True, slots=True)
class Reply:
    """Outputs by name, and the response's parameters."""

    outputs: dict[str, Any]
    parameters: dict[str, Any]


class GrpcClient:
    """The server's gRPC port."""

    def __init__(self, server: triglot.Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self._infer = channel.unary_unary(
            SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        self.open_stream = channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )

    async def infer(self, model: str, inputs: Mapping[str, Any], timeout: float = SECONDS, **fields: Any) -> Reply:
        """Raise `grpc.aio.AioRpcError`."""
        return reply(await self._infer(request(model, inputs, **fields), timeout=timeout))

    async def failure(self, model: str, inputs: Mapping[str, Any], **fields: Any) -> tuple[grpc.StatusCode, str]:
        """The code and the text with which a call fails. Raise `AssertionError` when it does not."""
        try:
            answer = await self.infer(model, inputs, **fields)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"no error, but {answer}")

    async def stream(
        self, requests: Iterable[pb.ModelInferRequest], timeout: float | None = SECONDS
    ) -> AsyncGenerator[Any, None]:
        """The messages of a stream of these requests."""
        call = self.open_stream(iter(list(requests)), timeout=timeout)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()


def request(model: str, inputs: Mapping[str, Any], **fields: Any) -> pb.ModelInferRequest:
    """`fields`: `id`, `outputs` by name, `parameters` of bool, int and str, and `input_parameters` by input."""
    message = pb.ModelInferRequest(model_name=model, id=fields.get("id", ""))
    for name in fields.get("outputs", ()):
        message.outputs.add(name=name)
    _set(message.parameters, fields.get("parameters", {}))
    for name, value in inputs.items():
        array = np.asarray(value)
        tensor = message.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        _set(tensor.parameters, fields.get("input_parameters", {}).get(name, {}))
        raw = raw_buffer(array)
        message.raw_input_contents.append(raw.tobytes() if isinstance(raw, np.ndarray) else bytes(raw))
        assert byte_length(raw) == len(message.raw_input_contents[-1])
    return message


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(parameters[key], kind, value)


def reply(message: pb.ModelInferResponse) -> Reply:
    """What a response holds."""
    outputs = {}
    for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        count = int(np.prod(tensor.shape))
        if tensor.datatype == "BYTES":
            outputs[tensor.name] = object_array(unpack_bytes(raw, count), tensor.shape)
        else:
            outputs[tensor.name] = np.frombuffer(raw, DATATYPES[tensor.datatype].dtype).reshape(tensor.shape)
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()
    }
    return Reply(outputs, parameters)


@asynccontextmanager
async def serving(*paths: Path | Mapping[str, Path], **options: Any) -> AsyncIterator[GrpcClient]:
    """A server of the models at `paths`."""
    async with (
        testing.serve(*paths, **options) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        yield GrpcClient(server.server, channel)


def write_model(folder: Path, name: str, code: str, config: str = "", *, imports: str = "") -> Path:
    """A model's folder, with `code` after the usual imports."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    head = (
        "import json\nimport threading\n\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
        f"{imports}\n\n"
    )
    (version / "model.py").write_text(head + code)
    if config:
        (folder / name / "config.pbtxt").write_text(config)
    return folder / name


def copied(folder: Path, *names: str) -> list[Path]:
    """Some of the models that lie beside the tests, in a folder of the test's own."""
    return [Path(shutil.copytree(MODELS / name, folder / name)) for name in names]


def text(value: str) -> Any:
    """A BYTES tensor of one element."""
    return np.array([value.encode()], object)


X_TO_Y = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
"""A configuration's inputs and outputs."""
DECOUPLED = X_TO_Y + "model_transaction_policy { decoupled: true }\n"


def ints(*values: int) -> Any:
    """An INT32 array."""
    return np.array(values, np.int32)


def in_common(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a test and the code of its models have in common: a module `probe` that both know."""
    module = SimpleNamespace(begun=threading.Event(), returned=threading.Event(), seen=[], senders=[])
    monkeypatch.setitem(sys.modules, "probe", module)
    return module
