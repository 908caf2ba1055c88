"""ONNX models: made here, served, and compared with what onnxruntime itself answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.protocol_clients.channel import SERVICE
from triglot import backends, testing
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import datatype_of, object_array, pack_bytes
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import KServeGrpc

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


def raw(array: Any) -> bytes:
    return pack_bytes(array.ravel().tolist()) if array.dtype == object else bytes(array.tobytes())


@contextmanager
def serve(folder: Path) -> Iterator[KServeGrpc]:
    with testing.serve(folder) as server, KServeGrpc(server) as client:
        yield client


def metadata_of(client: KServeGrpc) -> pb.ModelMetadataResponse:
    request = pb.ModelMetadataRequest(name="model")
    metadata: pb.ModelMetadataResponse = client.call(SERVICE + "ModelMetadata", request, pb.ModelMetadataResponse)
    return metadata


def infer(
    client: KServeGrpc, *, parameters: Mapping[str, Any] | None = None, **inputs: Any
) -> tuple[str, list[int], bytes]:
    """Datatype, shape and bytes of the output `y`, which is the only one."""
    ((name, array),) = client.infer("model", inputs, parameters=parameters or {}).items()
    assert name == "y"
    return datatype_of(array), list(array.shape), raw(array)


# --- datatypes and shapes ---


@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype(tmp_path: Path, datatype: str) -> None:
    kind, array = SAMPLES[datatype]
    save_identity(tmp_path / "model" / "model.onnx", kind, ["N"])
    with serve(tmp_path) as client:
        for elements in (array, array[:1], array[:0]):
            assert infer(client, x=elements) == (datatype, [len(elements)], raw(elements))
        metadata = client.call(
            SERVICE + "ModelMetadata", pb.ModelMetadataRequest(name="model"), pb.ModelMetadataResponse
        )
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


def test_a_scalar(tmp_path: Path) -> None:
    total = node("ReduceSum", "x", keepdims=0)
    save(tmp_path / "model" / "model.onnx", total, [tensor("x", "FLOAT", ["N"])], tensor("y", "FLOAT", []))
    with serve(tmp_path) as client:
        assert infer(client, x=np.ones(4, "f4")) == ("FP32", [], np.float32(4).tobytes())


def test_an_output_whose_rank_the_model_does_not_say(tmp_path: Path) -> None:
    inputs = [tensor("x", "INT64", ["N"]), tensor("to", "INT64", ["K"])]
    save(tmp_path / "model" / "model.onnx", node("Reshape", "x to"), inputs, tensor("y", "INT64", None))
    x = np.arange(4, dtype="i8")
    with serve(tmp_path) as client:
        assert infer(client, x=x, to=np.array([2, 2])) == ("INT64", [2, 2], x.tobytes())


def test_two_inputs(tmp_path: Path) -> None:
    inputs = [tensor("a", "FLOAT", ["N", 2]), tensor("b", "FLOAT", [2])]
    file = tmp_path / "model" / "model.onnx"
    save(file, node("Sub", "a b"), inputs, tensor("y", "FLOAT", ["N", 2]))
    assert specs(backends.load("onnx", file)) == [
        ("a", "FP32", [-1, 2]),
        ("b", "FP32", [2]),
        ("y", "FP32", [-1, 2]),
    ]
    a, b = np.arange(6, dtype="f4").reshape(3, 2), np.array([1, 10], "f4")
    with serve(tmp_path) as client:
        # By name, in whatever order they are sent.
        expected = ("FP32", [3, 2], (a - b).tobytes())
        assert infer(client, a=a, b=b) == expected
        assert infer(client, b=b, a=a) == expected


def test_the_answer_is_onnxruntimes_own(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((64, 10)).astype("f4")
    constant = onnx.numpy_helper.from_array(weights, "weights")
    file = tmp_path / "model" / "model.onnx"
    inputs, output = [tensor("x", "FLOAT", ["N", 64])], tensor("y", "FLOAT", ["N", 10])
    save(file, node("MatMul", "x weights"), inputs, output, [constant])
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    with serve(tmp_path) as client:
        for batch in (1, 3, 128, 0):
            x = random.standard_normal((batch, 64)).astype("f4")
            (expected,) = session.run(None, {"x": x})
            assert infer(client, x=x) == ("FP32", [batch, 10], expected.tobytes())


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


def test_a_request_of_any_alignment(tmp_path: Path) -> None:
    save_identity(tmp_path / "model" / "model.onnx", "DOUBLE", ["N"])
    array = np.arange(10_000, dtype="f8")
    with serve(tmp_path) as client:
        for length in range(9):
            assert infer(client, parameters={"p": "i" * length}, x=array) == ("FP64", [10_000], array.tobytes())


def test_strings_of_any_shape(tmp_path: Path) -> None:
    model = backends.load("onnx", save_identity(tmp_path / "model.onnx", "STRING", ["N", "M"]))
    elements = [f"{number} ä".encode() for number in range(6)]
    answer = model.infer({"x": object_array(elements, (2, 3))})["y"]
    assert answer.shape == (2, 3)
    assert [element.encode() for element in answer.ravel()] == elements


def test_a_string_that_is_not_utf8(tmp_path: Path) -> None:
    save_identity(tmp_path / "model" / "model.onnx", "STRING", ["N"])
    with serve(tmp_path) as client:
        with pytest.raises(InvalidArgument, match=r"^input 'x': ONNX strings are UTF-8, an element is not: "):
            infer(client, x=object_array([b"good", b"\xff"], (2,)))
        assert infer(client, x=object_array([b"good"], (1,))) == ("BYTES", [1], pack_bytes([b"good"]))


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
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    file = save_identity(tmp_path / "model" / "model.onnx", "FLOAT", ["N"])
    file.write_bytes(file.read_bytes()[:40] if content == b"half" else content)
    load_error(file)
    with pytest.raises(ModelLoadError), serve(tmp_path):
        pass
