"""Inference with tensors in shared memory, and with classes, over gRPC, streams and REST."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

import triglot
from tests.process import PLAIN_MODELS
from tests.protocol_clients.kserve_async import SERVICE, STATUS_OF
from tests.protocols.kserve_served import MODELS, Served, serve_models
from triglot.core.errors import Code
from triglot.core.tensor import DATATYPES, Array, datatype_of
from triglot.core.types import OutputOptions, RegionSlice
from triglot.pb.kserve import inference_pb2 as pb

PREFIX = "/triglot-test-"
INTERFACES = ("grpc", "stream", "rest")
SHM = Path("/dev/shm")
Wishes = Mapping[str, OutputOptions | None]
"""What becomes of the outputs that are requested."""
LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Memory:
    """An object of POSIX shared memory, as another process sees it."""

    key: str

    @property
    def path(self) -> Path:
        return SHM / self.key[1:]

    def put(self, data: bytes | Array, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data if isinstance(data, bytes) else data.tobytes())

    def get(self, size: int, offset: int = 0) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def array(self, dtype: str, count: int, offset: int = 0) -> Array:
        return np.frombuffer(self.get(count * np.dtype(dtype).itemsize, offset), dtype)

    def cut(self, size: int) -> None:
        os.truncate(self.path, size)


@contextmanager
def memory(size: int = 4096, prefix: str = PREFIX) -> Iterator[Memory]:
    made = Memory(f"{prefix}{uuid4().hex}")
    made.path.write_bytes(bytes(size))
    try:
        yield made
    finally:
        made.path.unlink(missing_ok=True)


def filled(datatype: str, value: int, size: int) -> bytes:
    """So many bytes of a value."""
    dtype = DATATYPES[datatype].dtype
    return np.full(size // dtype.itemsize, value, dtype).tobytes()


@dataclass(frozen=True)
class In:
    """An input with its elements, or in a region."""

    name: str
    data: Array | RegionSlice | bytes
    datatype: str = ""
    shape: Sequence[int] = ()

    @property
    def kind(self) -> str:
        return self.datatype or datatype_of(np.asarray(self.data))

    @property
    def dims(self) -> list[int]:
        return list(self.data.shape if isinstance(self.data, np.ndarray) else self.shape)


SIZE = 4 * 2**20
"""Of a region "r" that is one large input; what is copied on a thread, where there are more cores than one."""
FULL_REGION = RegionSlice("r", 0, SIZE)
X = [In("x", FULL_REGION, "FP32", [1, SIZE // 4])]
SHRUNK = (
    f"shared memory region 'r': expected {SIZE} bytes, got fewer: its object was truncated after it was registered"
)


@dataclass(frozen=True)
class Outcome:
    """A code with its text, or outputs by name: datatype, shape, and their bytes as they came."""

    code: Code
    text: str = ""
    outputs: dict[str, tuple[str, list[int], bytes]] | None = None

    def raw(self, name: str = "y") -> bytes:
        assert self.outputs is not None, self
        return self.outputs[name][2]


SHRUNK_MEANWHILE = (
    f"shared memory region 'r': expected {SIZE} bytes, got fewer: its object was truncated, or the "
    "system has no memory for a part that was never written"
)


def failure(interface: str, text: str = SHRUNK) -> Outcome:
    """An error of the request; in a stream it has no code."""
    return Outcome(Code.UNKNOWN if interface == "stream" else Code.INVALID_ARGUMENT, text)


async def ask(
    served: Served, interface: str, model: str, inputs: Sequence[In], outputs: Wishes | None = None
) -> Outcome:
    """One answer, as raw data."""
    if interface == "rest":
        return await _rest(served, model, inputs, outputs or {})
    message = message_of(model, inputs, outputs or {})
    if interface == "stream":
        return (await stream(served, [message]))[0]
    code, text, reply = await served.grpc.call("ModelInfer", message.SerializeToString())
    return Outcome(code, text) if code is not Code.OK else _outcome_of(pb.ModelInferResponse.FromString(reply))


async def stream(served: Served, messages: Sequence[pb.ModelInferRequest]) -> list[Outcome]:
    """Everything that one ModelStreamInfer answers; errors in band have the code UNKNOWN."""

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message.SerializeToString()

    answers = []
    async for data in served.grpc.channel.stream_stream(SERVICE + "ModelStreamInfer")(requests(), timeout=20):
        answer = pb.ModelStreamInferResponse.FromString(data)
        failed = Outcome(Code.UNKNOWN, answer.error_message)
        answers.append(failed if answer.error_message else _outcome_of(answer.infer_response))
    return answers


def _outcome_of(reply: pb.ModelInferResponse) -> Outcome:
    pairs = zip(reply.outputs, reply.raw_output_contents, strict=True)
    return Outcome(Code.OK, "", {pair.name: (pair.datatype, list(pair.shape), raw) for pair, raw in pairs})


def message_of(model: str, inputs: Sequence[In], outputs: Wishes, request_id: str = "") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    for input_tensor in inputs:
        tensor = message.inputs.add(name=input_tensor.name, datatype=input_tensor.kind, shape=input_tensor.dims)
        if isinstance(input_tensor.data, RegionSlice):
            _set(tensor.parameters, options(OutputOptions(region=input_tensor.data)))
        else:
            message.raw_input_contents.append(
                input_tensor.data if isinstance(input_tensor.data, bytes) else input_tensor.data.tobytes()
            )
    for name, wish in outputs.items():
        _set(message.outputs.add(name=name).parameters, options(wish))
    return message


def _set(parameters: Any, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, str):
            parameters[key].string_param = value
        else:
            parameters[key].int64_param = value


def options(wish: OutputOptions | None) -> dict[str, Any]:
    """The parameters of a tensor; an offset of 0 is omitted, as clients do."""
    if wish is None:
        return {}
    if wish.region is None:
        return {"classification": wish.classes}
    place = {"shared_memory_region": wish.region.region, "shared_memory_byte_size": wish.region.size}
    return place | ({"shared_memory_offset": wish.region.offset} if wish.region.offset else {})


async def _rest(served: Served, model: str, inputs: Sequence[In], outputs: Wishes) -> Outcome:
    tensors, tail = [], b""
    for input_tensor in inputs:
        tensor: dict[str, Any] = {
            "name": input_tensor.name,
            "datatype": input_tensor.kind,
            "shape": input_tensor.dims,
        }
        if isinstance(input_tensor.data, RegionSlice):
            tensor["parameters"] = options(OutputOptions(region=input_tensor.data))
        else:
            raw = input_tensor.data if isinstance(input_tensor.data, bytes) else input_tensor.data.tobytes()
            tensor["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
        tensors.append(tensor)
    body: dict[str, Any] = {"inputs": tensors, "parameters": {"binary_data_output": True}}
    if outputs:
        body["outputs"] = [
            {
                "name": name,
                "parameters": options(wish) | {"binary_data": wish is None or wish.region is None},
            }
            for name, wish in outputs.items()
        ]
    text = json.dumps(body).encode()
    status, headers, reply = await served.rest.call(
        "POST", f"/v2/models/{model}/infer", text + tail, {LENGTH: str(len(text))}
    )
    if status != STATUS_OF[Code.OK]:
        return Outcome(code_of(status), json.loads(reply)["error"])
    at = int(headers.get(LENGTH, len(reply)))
    found = {}
    for output in json.loads(reply[:at])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        assert "data" not in output
        found[output["name"]] = (output["datatype"], output["shape"], reply[at : at + size])
        at += size
    assert at == len(reply)
    return Outcome(Code.OK, "", found)


async def register(
    served: Served, name: str, made: Memory | str, size: int, offset: int = 0, *, interface: str = "grpc"
) -> tuple[Code, str]:
    key = made if isinstance(made, str) else made.key
    if interface == "grpc":
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)
        code, text, reply = await served.grpc.call("SystemSharedMemoryRegister", request.SerializeToString())
        assert not reply
        return code, text
    body = {"key": key, "byte_size": size} | ({"offset": offset} if offset else {})
    return await post(served, f"/v2/systemsharedmemory/region/{name}/register", body)


async def unregister(served: Served, name: str = "", *, interface: str = "grpc") -> tuple[Code, str]:
    if interface == "grpc":
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        return (await served.grpc.call("SystemSharedMemoryUnregister", request.SerializeToString()))[:2]
    return await post(served, f"/v2/systemsharedmemory{f'/region/{name}' if name else ''}/unregister")


async def post(served: Served, path: str, body: Any = None) -> tuple[Code, str]:
    """The code of the status, and the text of the error; a call that goes well has no body."""
    status, _, reply = await served.rest.call("POST", path, b"" if body is None else json.dumps(body).encode())
    code = code_of(status)
    assert bool(reply) is (code is not Code.OK)
    return code, json.loads(reply)["error"] if reply else ""


def code_of(status: int) -> Code:
    """The first of those that have this status."""
    codes = {number: code for code, number in reversed(STATUS_OF.items())}
    return (codes | {413: Code.RESOURCE_EXHAUSTED})[status]


@asynccontextmanager
async def serving_memory(
    regions: Mapping[str, Memory], model: triglot.Model | None = None, **options: Any
) -> AsyncIterator[Served]:
    """A server of the identities, or of a model as `scalar`, and these regions, each a whole object."""
    own: dict[str, Any] = {} if model is None else {"paths": [MODELS / "scalar"], "load": lambda *_: model}
    own.setdefault("paths", sorted(PLAIN_MODELS.glob("identity_*")))
    async with serve_models(**own, shared_memory_prefix=PREFIX, **options) as served:
        for name, region in regions.items():
            assert await register(served, name, region, SIZE) == (Code.OK, "")
        yield served
