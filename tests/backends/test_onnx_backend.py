"""ONNX models: made here, served, and compared with what onnxruntime itself answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

import triglot
from process import SECONDS
from protocol_clients.channel import SERVICE
from triglot import backends, testing
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import object_array, pack_bytes, unpack_bytes
from triglot.pb.kserve import inference_pb2 as pb

onnx = pytest.importorskip("onnx", reason="the onnx package makes the models of these tests")
onnxruntime = pytest.importorskip("onnxruntime")

# Every datatype with some elements of it; BYTES stands for ONNX's strings.
SAMPLES: dict[str, tuple[str, Any]] = {
    "BOOL": ("BOOL", np.array([True, False, True])),
    "UINT8": ("UINT8", np.array([0, 255, 7], "u1")),
    "UINT16": ("UINT16", np.array([0, 2**16 - 1, 7], "u2")),
    "UINT32": ("UINT32", np.array([0, 2**32 - 1, 7], "u4")),
    "UINT64": ("UINT64", np.array([0, 2**64 - 1, 7], "u8")),
    "INT8": ("INT8", np.array([-128, 127, 7], "i1")),
    "INT16": ("INT16", np.array([-(2**15), 2**15 - 1, 7], "i2")),
    "INT32": ("INT32", np.array([-(2**31), 2**31 - 1, 7], "i4")),
    "INT64": ("INT64", np.array([-(2**63), 2**63 - 1, 7], "i8")),
    "FP16": ("FLOAT16", np.array([-1.5, np.inf, 65504], "f2")),
    "FP32": ("FLOAT", np.array([-1.5, np.nan, np.inf], "f4")),
    "FP64": ("DOUBLE", np.array([-1.5, np.nan, 5e-324], "f8")),
    "BYTES": ("STRING", object_array([b"", b"a\0b", "größe €".encode()], (3,))),
}
Dims = Sequence[int | str] | None


def tensor(name: str, kind: str, dims: Dims) -> Any:
    return onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), dims)


def node(operator: str, inputs: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(operator, inputs.split(), ["y"], **attributes)


def save(file: Path, one_node: Any, inputs: list[Any], output: Any, constants: Sequence[Any] = ()) -> Path:
    """A model of one node whose output is called `y`."""
    graph = onnx.helper.make_graph([one_node], "graph", inputs, [output], initializer=constants)
    file.parent.mkdir(parents=True, exist_ok=True)
    versions = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=versions, ir_version=8), file)
    return file


def save_identity(file: Path, kind: str, dims: Dims) -> Path:
    return save(file, node("Identity", "x"), [tensor("x", kind, dims)], tensor("y", kind, dims))


def specs(model: triglot.Model) -> list[tuple[str, str, list[int]]]:
    return [(spec.name, spec.datatype, list(spec.shape or [])) for spec in (*model.inputs, *model.outputs)]


class Client:
    """A gRPC client of one model; every answer is an output `y`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def metadata(self) -> pb.ModelMetadataResponse:
        request = pb.ModelMetadataRequest(name="model").SerializeToString()
        reply = await self._channel.unary_unary(SERVICE + "ModelMetadata")(request, timeout=SECONDS)
        return pb.ModelMetadataResponse.FromString(reply)

    async def infer(self, datatype: str, request_id: str = "", **inputs: Any) -> tuple[str, list[int], bytes]:
        """Datatype, shape and bytes of the answer."""
        message = pb.ModelInferRequest(
            model_name="model",
            id=request_id,
            inputs=[
                pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=array.shape)
                for name, array in inputs.items()
            ],
            raw_input_contents=[raw(array) for array in inputs.values()],
        )
        reply = await self._channel.unary_unary(SERVICE + "ModelInfer")(
            message.SerializeToString(), timeout=SECONDS
        )
        response = pb.ModelInferResponse.FromString(reply)
        (output,) = response.outputs
        assert output.name == "y"
        return output.datatype, list(output.shape), response.raw_output_contents[0]


def raw(array: Any) -> bytes:
    return pack_bytes(array.ravel().tolist()) if array.dtype == object else bytes(array.tobytes())


@asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[Client]:
    async with testing.serve(folder) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        yield Client(channel)


# --- datatypes and shapes ---


@pytest.mark.parametrize("datatype", SAMPLES)
async def test_every_datatype(tmp_path: Path, datatype: str) -> None:
    kind, array = SAMPLES[datatype]
    save_identity(tmp_path / "model" / "model.onnx", kind, ["N"])
    async with serve(tmp_path) as client:
        for elements in (array, array[:1], array[:0]):
            assert await client.infer(datatype, x=elements) == (datatype, [len(elements)], raw(elements))
        metadata = await client.metadata()
        assert metadata.platform == "onnxruntime_onnx"
        assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("x", datatype, [-1])]
        assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [("y", datatype, [-1])]


@pytest.mark.parametrize(
    ("dims", "shape"),
    [([], []), ([3], [3]), (["batch", 3], [-1, 3]), ([None, 3, None], [-1, 3, -1]), ([1, 2, 3, 4], [1, 2, 3, 4])],
)
def test_dims(tmp_path: Path, dims: Dims, shape: list[int]) -> None:
    model = backends.load("onnx", save_identity(tmp_path / "model.onnx", "FLOAT", dims))
    assert specs(model) == [("x", "FP32", shape), ("y", "FP32", shape)]


async def test_a_scalar(tmp_path: Path) -> None:
    total = node("ReduceSum", "x", keepdims=0)
    save(tmp_path / "model" / "model.onnx", total, [tensor("x", "FLOAT", ["N"])], tensor("y", "FLOAT", []))
    async with serve(tmp_path) as client:
        assert await client.infer("FP32", x=np.ones(4, "f4")) == ("FP32", [], np.float32(4).tobytes())


async def test_an_output_whose_rank_the_model_does_not_say(tmp_path: Path) -> None:
    inputs = [tensor("x", "INT64", ["N"]), tensor("to", "INT64", ["K"])]
    save(tmp_path / "model" / "model.onnx", node("Reshape", "x to"), inputs, tensor("y", "INT64", None))
    x = np.arange(4, dtype="i8")
    async with serve(tmp_path) as client:
        assert await client.infer("INT64", x=x, to=np.array([2, 2])) == ("INT64", [2, 2], x.tobytes())


async def test_two_inputs(tmp_path: Path) -> None:
    inputs = [tensor("a", "FLOAT", ["N", 2]), tensor("b", "FLOAT", [2])]
    file = tmp_path / "model" / "model.onnx"
    save(file, node("Sub", "a b"), inputs, tensor("y", "FLOAT", ["N", 2]))
    assert specs(backends.load("onnx", file)) == [
        ("a", "FP32", [-1, 2]),
        ("b", "FP32", [2]),
        ("y", "FP32", [-1, 2]),
    ]
    a, b = np.arange(6, dtype="f4").reshape(3, 2), np.array([1, 10], "f4")
    async with serve(tmp_path) as client:
        # By name, in whatever order they are sent.
        expected = ("FP32", [3, 2], (a - b).tobytes())
        assert await client.infer("FP32", a=a, b=b) == expected
        assert await client.infer("FP32", b=b, a=a) == expected


async def test_the_answer_is_onnxruntimes_own(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((64, 10)).astype("f4")
    constant = onnx.numpy_helper.from_array(weights, "weights")
    file = tmp_path / "model" / "model.onnx"
    inputs, output = [tensor("x", "FLOAT", ["N", 64])], tensor("y", "FLOAT", ["N", 10])
    save(file, node("MatMul", "x weights"), inputs, output, [constant])
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    async with serve(tmp_path) as client:
        for batch in (1, 3, 128, 0):
            x = random.standard_normal((batch, 64)).astype("f4")
            (expected,) = session.run(None, {"x": x})
            assert await client.infer("FP32", x=x) == ("FP32", [batch, 10], expected.tobytes())


# --- the request's own bytes ---


@pytest.mark.parametrize("datatype", ["FP64", "INT16", "FP32"])
def test_an_unaligned_array(tmp_path: Path, datatype: str) -> None:
    kind, array = SAMPLES[datatype]
    model = backends.load("onnx", save_identity(tmp_path / "model.onnx", kind, ["N"]))
    for offset in range(9):
        data = bytes(offset) + array.tobytes()
        view = np.frombuffer(data, array.dtype, offset=offset)
        assert model.infer({"x": view})["y"].tobytes() == array.tobytes()
        assert data == bytes(offset) + array.tobytes()


async def test_a_request_of_any_alignment(tmp_path: Path) -> None:
    save_identity(tmp_path / "model" / "model.onnx", "DOUBLE", ["N"])
    array = np.arange(10_000, dtype="f8")
    async with serve(tmp_path) as client:
        for length in range(9):
            assert await client.infer("FP64", "i" * length, x=array) == ("FP64", [10_000], array.tobytes())


def test_strings_of_any_shape(tmp_path: Path) -> None:
    model = backends.load("onnx", save_identity(tmp_path / "model.onnx", "STRING", ["N", "M"]))
    elements = [f"{number} ä".encode() for number in range(6)]
    answer = model.infer({"x": object_array(elements, (2, 3))})["y"]
    assert answer.shape == (2, 3)
    assert [element.encode() for element in answer.ravel()] == elements


async def test_a_string_that_is_not_utf8(tmp_path: Path) -> None:
    save_identity(tmp_path / "model" / "model.onnx", "STRING", ["N"])
    async with serve(tmp_path) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.infer("BYTES", x=object_array([b"good", b"\xff"], (2,)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(caught.value.details()).startswith("input 'x': ONNX strings are UTF-8, an element is not: ")
        _, _, data = await client.infer("BYTES", x=object_array([b"good"], (1,)))
        assert unpack_bytes(data, 1) == [b"good"]


def test_a_string_that_is_not_utf8_without_a_server(tmp_path: Path) -> None:
    model = backends.load("onnx", save_identity(tmp_path / "model.onnx", "STRING", ["N"]))
    with pytest.raises(InvalidArgument):
        model.infer({"x": object_array([b"\xff"], (1,))})


# --- what cannot be loaded ---


def load_error(file: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        backends.load("onnx", file)
    assert str(caught.value).startswith(f"{file}: ")
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a model", b"half"])
async def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    file = save_identity(tmp_path / "model" / "model.onnx", "FLOAT", ["N"])
    file.write_bytes(file.read_bytes()[:40] if content == b"half" else content)
    load_error(file)
    with pytest.raises(ModelLoadError):
        async with serve(tmp_path):
            pass
