"""ONNX tensors of rank 0, BF16, maps, sequences and optional tensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("onnx", reason="the onnx package makes the models of these tests")
pytest.importorskip("onnxruntime")

from numpy.testing import assert_array_equal
from onnx import TensorProto, helper

from tests.backends.onnx_graphs import FLOAT, INT64, ML, classifier, node, rest_of, save_graph, sent, value
from tests.backends.test_onnx_backend import infer, serve
from triglot import backends
from triglot.core.errors import Internal, ModelLoadError
from triglot.core.tensor import bytes_elements, object_array

BF16 = np.dtype(ml_dtypes.bfloat16)
X = [1.0, 0.0, 0.25, 0.5]
ROWS = value("x", FLOAT, [None, 2])


def load(file: Path) -> Any:
    return backends.load("onnx", file)


# --- rank 0 ---


async def test_scalars(tmp_path: Path) -> None:
    nodes = [node("Mul", ["x", "rate"], ["z"]), node("ReduceSum", ["z"], ["total"], keepdims=0)]
    outputs = [value("total", FLOAT, []), value("z", FLOAT, None)]
    save_graph(
        tmp_path / "model" / "model.onnx", nodes, [value("x", FLOAT, ["n"]), value("rate", FLOAT, [])], outputs
    )
    x = sent("FP32", [2], [1.0, 2.0])
    async with rest_of(tmp_path) as rest:
        assert await rest.shapes("model") == {"x": [-1], "rate": [], "total": [], "z": [-1]}
        # Triton has no rank 0: its clients send [1].
        for shape in ([], [1]):
            status, outputs = await rest.infer("model", x, sent("FP32", shape, [3.0], "rate"))
            assert (status, outputs) == (200, {"total": ([], [9.0]), "z": ([2], [3.0, 6.0])})
        for shape in ([1, 1], [2]):
            status, text = await rest.infer("model", x, sent("FP32", shape, [3.0] * shape[-1], "rate"))
            assert (status, "Expected [], got [" in text) == (400, True)


@pytest.mark.parametrize("dims", ["dims: 1 reshape { shape: [] }", "dims: 1"])
async def test_scalar_of_a_triton_configuration(tmp_path: Path, dims: str) -> None:
    save_graph(
        tmp_path / "model" / "1" / "model.onnx",
        [node("Identity", ["x"], ["y"])],
        [value("x", FLOAT, [])],
        [value("y", FLOAT, ["n"])],
    )
    (tmp_path / "model" / "config.pbtxt").write_text(f'input {{ name: "x" data_type: TYPE_FP32 {dims} }}')
    async with rest_of(tmp_path) as rest:
        assert (await rest.shapes("model"))["x"] == [1]
        status, outputs = await rest.infer("model", sent("FP32", [1], [3.0]))
        assert (status, outputs["y"][1]) == (200, [3.0])


# --- BF16 ---


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 3), ()], ids=str)
def test_bf16(tmp_path: Path, shape: tuple[int, ...]) -> None:
    dims = [f"d{at}" for at in range(len(shape))]
    file = tmp_path / "model" / "model.onnx"
    tensors = value("x", TensorProto.BFLOAT16, dims), value("y", TensorProto.BFLOAT16, dims)
    save_graph(file, [node("Identity", ["x"], ["y"])], [tensors[0]], [tensors[1]])
    array = np.arange(int(np.prod(shape)), dtype=BF16).reshape(shape) - BF16.type(1.5)
    with serve(tmp_path) as client:
        for text in ("", "odd"):  # Any alignment of the bytes.
            answer = infer(client, parameters={"p": text}, x=array)
            assert answer == ("BF16", list(shape), array.tobytes())


def test_bf16_with_other_types(tmp_path: Path) -> None:
    nodes = [node("Cast", ["x"], ["z"], to=FLOAT), node("Add", ["z", "a"], ["y"])]
    inputs = [value("x", TensorProto.BFLOAT16, ["n"]), value("a", FLOAT, ["n"])]
    model = load(save_graph(tmp_path / "model.onnx", nodes, inputs, [value("y", FLOAT, ["n"])]))
    answer = model.infer({"x": np.array([1.5, -2], BF16), "a": np.array([1, 1], np.float32)})
    assert_array_equal(answer["y"], np.array([2.5, -1], np.float32))


def test_bf16_with_strings_is_refused(tmp_path: Path) -> None:
    nodes = [node("Identity", ["x"], ["y"]), node("Identity", ["text"], ["z"])]
    inputs = [value("x", TensorProto.BFLOAT16, ["n"]), value("text", TensorProto.STRING, ["n"])]
    outputs = [value("y", TensorProto.BFLOAT16, ["n"]), value("z", TensorProto.STRING, ["n"])]
    with pytest.raises(ModelLoadError, match=r"input 'text' is tensor\(string\): .* strings beside BF16"):
        load(save_graph(tmp_path / "model.onnx", nodes, inputs, outputs))


# --- text that is not UTF-8 ---

TEXTS = [b"ok", b"\xff", b"", b"caf\xe9, and longer than a std::string keeps in itself \xfe", "größe".encode()]


def save_texts(file: Path, *, with_text: bool = False) -> Path:
    """`y` is the elements of TEXTS at `i`."""
    table = TensorProto(name="t", data_type=TensorProto.STRING, dims=[len(TEXTS)], string_data=TEXTS)
    nodes = [node("Constant", [], ["table"], value=table), node("Gather", ["table", "i"], ["y"])]
    inputs, outputs = [value("i", INT64, None)], [value("y", TensorProto.STRING, None)]
    if with_text:
        nodes.append(node("Identity", ["x"], ["z"]))
        inputs.append(value("x", TensorProto.STRING, ["n"]))
        outputs.append(value("z", TensorProto.STRING, ["n"]))
    return save_graph(file, nodes, inputs, outputs)


@pytest.mark.parametrize("indices", [[1], [0, 1, 2, 3, 4], [[3, 0], [1, 4]], [0, 4], []], ids=str)
def test_output_text_that_is_not_utf8(tmp_path: Path, indices: list[Any]) -> None:
    model = load(save_texts(tmp_path / "model.onnx"))
    wanted = np.array(indices, np.int64)
    for _ in range(2):
        answer = model.infer({"i": wanted})["y"]
        assert answer.shape == wanted.shape
        assert bytes_elements(answer) == [TEXTS[at] for at in wanted.ravel()]


async def test_output_text_that_is_not_utf8_over_rest(tmp_path: Path) -> None:
    """JSON is UTF-8: V2's clients get it as binary data, TensorFlow Serving's raw, as from TensorFlow Serving."""
    save_texts(tmp_path / "model" / "model.onnx")
    indices = sent("INT64", [2], [0, 1], "i")
    async with rest_of(tmp_path) as rest:
        status, text = await rest.infer("model", indices)
        assert (status, "has a BYTES element that is not UTF-8; request it as binary data" in text) == (400, True)
        assert await rest.infer("model", sent("INT64", [1], [0], "i")) == (200, {"y": ([1], ["ok"])})


def test_output_text_that_is_not_utf8_with_text_inputs(tmp_path: Path) -> None:
    model = load(save_texts(tmp_path / "model.onnx", with_text=True))
    text = object_array([b"a"], (1,))
    with pytest.raises(Internal, match=r"cannot return text that is not UTF-8 beside inputs of strings"):
        model.infer({"i": np.array([1]), "x": text})
    assert bytes_elements(model.infer({"i": np.array([0]), "x": text})["y"]) == [b"ok"]


# --- types that no protocol has ---


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4"])
def test_small_types_name_the_cure(tmp_path: Path, kind: str) -> None:
    number = getattr(TensorProto, kind)
    y = value("y", number, ["n"])
    file = tmp_path / "model.onnx"
    save_graph(file, [node("Cast", ["x"], ["y"], to=number)], [value("x", FLOAT, ["n"])], [y], opset=21)
    with pytest.raises(
        ModelLoadError, match=rf"output 'y' is tensor\({kind.lower()}\), expected .*; add a Cast node"
    ):
        load(file)
    x = value("x", number, ["n"])
    save_graph(file, [node("Cast", ["x"], ["y"], to=FLOAT)], [x], [value("y", FLOAT, ["n"])], opset=21)
    with pytest.raises(
        ModelLoadError, match=rf"input 'x' is tensor\({kind.lower()}\), expected .*; add a Cast node"
    ):
        load(file)


SEQUENCE = node("SequenceConstruct", ["x"], ["s"]), helper.make_tensor_sequence_value_info("s", FLOAT, None)


async def test_other_outputs_than_a_sequence_are_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_graph(
        tmp_path / "model" / "model.onnx",
        [SEQUENCE[0], node("Identity", ["x"], ["y"])],
        [value("x", FLOAT, ["n"])],
        [SEQUENCE[1], value("y", FLOAT, ["n"])],
    )
    x = sent("FP32", [1], [1.0])
    reason = "'s' is seq(tensor(float)), expected one of tensor(bool), "
    async with rest_of(tmp_path) as rest:
        assert await rest.infer("model", x) == (200, {"y": ([1], [1.0])})
        assert await rest.infer("model", x, outputs=[{"name": "y"}]) == (200, {"y": ([1], [1.0])})
        status, text = await rest.infer("model", x, outputs=[{"name": "s"}])
    assert status == 400
    assert "unexpected inference output 's' for model 'model', which cannot return it: " + reason in text
    assert text.endswith("; add a ConcatFromSequence node, which joins the tensors")
    assert [reason in record.message for record in caplog.records if record.levelno == logging.WARNING] == [True]


def test_a_sequence_alone_cannot_be_loaded(tmp_path: Path) -> None:
    file = save_graph(tmp_path / "model.onnx", [SEQUENCE[0]], [value("x", FLOAT, ["n"])], [SEQUENCE[1]])
    with pytest.raises(ModelLoadError, match=r"output 's' is seq\(tensor\(float\)\), .*ConcatFromSequence"):
        load(file)


def optional(name: str) -> Any:
    return helper.make_value_info(
        name, helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["n"]))
    )


async def test_optional_tensors(tmp_path: Path) -> None:
    nodes = [node("OptionalHasElement", ["x"], ["has"]), node("Identity", ["x"], ["y"])]
    has = value("has", TensorProto.BOOL, [])
    save_graph(tmp_path / "model" / "model.onnx", nodes, [optional("x")], [has, optional("y")], opset=18)
    async with rest_of(tmp_path) as rest:
        assert await rest.infer("model", sent("FP32", [2], X[:2])) == (
            200,
            {"has": ([], [True]), "y": ([2], X[:2])},
        )
        assert await rest.infer("model") == (200, {"has": ([], [False])})


# --- maps of classifiers ---


def save_zipmap(file: Path, labels: list[Any], *, also_tensor: bool = False) -> Path:
    """As skl2onnx, onnxmltools and CatBoost export a classifier: a map from label to probability for each row."""
    text = isinstance(labels[0], str)
    kind, key = ("strings", TensorProto.STRING) if text else ("int64s", INT64)
    options: dict[str, Any] = {f"classlabels_{kind}": labels}
    zipped = node("ZipMap", ["scores"], ["probabilities"], domain=ML, **options)
    maps = helper.make_value_info(
        "probabilities",
        helper.make_sequence_type_proto(helper.make_map_type_proto(key, helper.make_tensor_type_proto(FLOAT, []))),
    )
    outputs = [value("label", key, [None]), maps]
    if also_tensor:
        outputs.append(value("scores", FLOAT, [None, len(labels)]))
    return save_graph(file, [classifier("scores", labels), zipped], [ROWS], outputs)


@pytest.mark.parametrize(
    ("labels", "named"),
    [([0, 1], ["0", "1"]), ([7, -3], ["7", "-3"]), (["no", "ja"], ["no", "ja"]), ([2, 1, 0], ["2", "1", "0"])],
    ids=str,
)
async def test_maps_are_a_tensor_with_labels(tmp_path: Path, labels: list[Any], named: list[str]) -> None:
    save_zipmap(tmp_path / "model" / "model.onnx", labels)
    width = len(labels)
    scores = [row[at % 2] for row in (X[:2], X[2:]) for at in range(width)]
    x = sent("FP32", [2, 2], X)
    async with rest_of(tmp_path) as rest:
        assert await rest.shapes("model") == {"x": [-1, 2], "label": [-1], "probabilities": [-1, width]}
        status, outputs = await rest.infer("model", x)
        assert (status, outputs["probabilities"]) == (200, ([2, width], scores))
        status, outputs = await rest.infer("model", x, outputs=[{"name": "label"}])
        assert (status, list(outputs)) == (200, ["label"])
        status, outputs = await rest.infer("model", sent("FP32", [0, 2], []))
        assert (status, outputs["probabilities"]) == (200, ([0, width], []))
        request_tensor = sent("FP32", [1, 2], X[:2])
        wanted = {"name": "probabilities", "parameters": {"classification": 1}}
        status, outputs = await rest.infer("model", request_tensor, outputs=[wanted])
    assert (status, outputs["probabilities"][1]) == (200, [f"1.000000:0:{named[0]}"])


async def test_maps_with_a_batch_size_and_a_label_file(tmp_path: Path) -> None:
    save_zipmap(tmp_path / "model" / "1" / "model.onnx", [0, 1])
    (tmp_path / "model" / "labels.txt").write_text("cat\ndog\n")
    (tmp_path / "model" / "config.pbtxt").write_text(
        "max_batch_size: 8 "
        'output { name: "probabilities" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }'
    )
    async with rest_of(tmp_path) as rest:
        wanted = {"name": "probabilities", "parameters": {"classification": 1}}
        status, outputs = await rest.infer("model", sent("FP32", [2, 2], X), outputs=[wanted])
    assert (status, outputs["probabilities"]) == (200, ([2, 1], ["1.000000:0:cat", "0.500000:1:dog"]))


def test_maps_with_their_tensor(tmp_path: Path) -> None:
    model = load(save_zipmap(tmp_path / "model.onnx", [0, 1], also_tensor=True))
    assert [spec.name for spec in model.outputs] == ["label", "scores"]
    assert model.labels == {"scores": [b"0", b"1"]}
