"""`reshape` in config.pbtxt: clients send and get `dims`, the model has the same elements in another shape."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.backends.test_onnx_backend import infer, metadata_of, node, save, save_identity, serve, tensor
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.model.reshaping import Reshape
from triglot.repository.config.model_config import read_config

ROWS = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 20000 }
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } } ]
"""


def configured(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text)
    return folder / "1" / "model.onnx"


def test_an_image_classifier(tmp_path: Path) -> None:
    file = configured(
        tmp_path / "model",
        """
        platform: "onnxruntime_onnx"
        max_batch_size : 0
        input [ { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 2, 2 ]
                  reshape { shape: [ 1, 3, 2, 2 ] } } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] reshape { shape: [ 1, 3, 1, 1 ] } } ]
        """,
    )
    image = tensor("x", "FLOAT", [1, 3, 2, 2])
    save(file, node("GlobalAveragePool", "x"), [image], tensor("y", "FLOAT", [1, 3, 1, 1]))
    pixels = np.arange(12, dtype="f4").reshape(3, 2, 2)
    with serve(tmp_path) as client:
        metadata = metadata_of(client)
        assert [list(t.shape) for t in (*metadata.inputs, *metadata.outputs)] == [[3, 2, 2], [3]]
        means = pixels.mean((1, 2)).astype("f4").tobytes()
        assert infer(client, x=pixels) == ("FP32", [3], means)
        with pytest.raises(InvalidArgument, match=r"Expected \[3,2,2\], got \[1,3,2,2\]"):
            infer(client, x=pixels[None])


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_rows_of_one_number(tmp_path: Path, execution: str) -> None:
    own = f'parameters {{ key: "execution" value: {{ string_value: "{execution}" }} }}'
    save_identity(configured(tmp_path / "model", ROWS + own), "FLOAT", ["batch"])
    with serve(tmp_path) as client:
        arrays = [np.full((rows, 1), rows, "f4") for rows in (1, 2, 3)]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda array: infer(client, x=array), arrays))
    assert answers == [("FP32", [len(array), 1], array.tobytes()) for array in arrays]


def test_dims_of_any_size(tmp_path: Path) -> None:
    text = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 2, -1, 3 ] reshape { shape: [ 1, 2, -1, 3 ] } } ]'
    text += (
        'output [ { name: "y" data_type: TYPE_FP32 dims: [ 2, -1, 1, 3 ] reshape { shape: [ 1, 2, -1, 3 ] } } ]'
    )
    save_identity(configured(tmp_path / "model", text), "FLOAT", [1, 2, "n", 3])
    with serve(tmp_path) as client:
        for size in (4, 1, 0):
            array = np.arange(6 * size, dtype="f4").reshape(2, size, 3)
            assert infer(client, x=array) == ("FP32", [2, size, 1, 3], array.tobytes())


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ("[ 2 ]", r"input\[0\]\.reshape\.shape: expected as many elements .* dims \[4\] have, got \[2\]"),
        ("[ -1 ]", r"input\[0\]\.reshape\.shape: expected as many elements .* dims \[4\] have, got \[-1\]"),
        ("[ 0 ]", r"input\[0\]\.reshape\.shape: expected 1 or more, or -1 for any size, got \[0\]"),
        ("[ 2, 2 ]", r"input\[0\]\.reshape\.shape: the configuration says \[2,2\], the model has \[1,4\]"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, shape: str, problem: str) -> None:
    text = f'input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape {{ shape: {shape} }} }} ]'
    save_identity(configured(tmp_path / "model", text), "FLOAT", [1, 4])
    with pytest.raises(ModelLoadError) as caught, serve(tmp_path):
        pass
    with pytest.raises(ModelLoadError, match=problem):
        raise caught.value.__cause__ or caught.value


def test_dims_are_required(tmp_path: Path) -> None:
    configured(tmp_path, 'output [ { name: "y" reshape { shape: [ 4 ] } } ]')
    with pytest.raises(ModelLoadError, match=r"output\[0\]\.reshape: expected dims beside it, got none"):
        read_config(tmp_path, [])


def test_a_backend_that_does_not_reshape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    configured(tmp_path / "model", ROWS.replace("reshape: { shape: [ ] } } ]\nout", "} ]\nout"))
    (tmp_path / "model" / "1").mkdir()
    (tmp_path / "model" / "1" / "model.py").write_text(
        "import triglot\n"
        "class M(triglot.Model):\n    def infer(self, inputs):\n        return {'y': inputs['x']}\n"
    )
    with serve(tmp_path) as client:
        assert infer(client, x=np.ones((2, 1), "f4")) == ("FP32", [2, 1], np.ones(2, "f4").tobytes())
    (warning,) = [record.message for record in caplog.records if "reshape" in record.message]
    assert warning.endswith("config.pbtxt: output[0].reshape: not supported by this backend, ignored")


segments = st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=3)


@given(segments, st.data(), st.booleans())
def test_round_trip(parts: list[list[int]], data: st.DataObject, batch: bool) -> None:
    """Of each part between the dims of any size the other shape has the product, in one dim or in none."""
    source, target, sizes = [], [], []
    for at, part in enumerate(parts):
        if at:
            sizes.append(data.draw(st.integers(0, 3)))
            source.append(-1)
            target.append(-1)
        source += part
        target += [math.prod(part)] if math.prod(part) > 1 or data.draw(st.booleans()) else []
    left = iter(sizes)
    first = [data.draw(st.integers(0, 2))] if batch else []
    shape = [*first, *(next(left) if dim == -1 else dim for dim in source)]
    array = np.arange(math.prod(shape)).reshape(shape)
    reshaped = Reshape(tuple(source), tuple(target), batch)(array)
    assert (reshaped.ndim, reshaped.ravel().tolist()) == (len(target) + batch, array.ravel().tolist())
    assert_array_equal(Reshape(tuple(target), tuple(source), batch)(reshaped), array)


def test_what_is_not_of_that_shape_is_left() -> None:
    reshape = Reshape((4,), (2, 2), batch=False)
    assert [reshape(np.zeros(shape)).shape for shape in ((4,), (5,), (1, 4), ())] == [(2, 2), (5,), (1, 4), ()]
    assert Reshape((), (1,), batch=True)(np.zeros(())).shape == ()


TRITON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            assert x.ndim == 1, x.shape
            x += 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        {end}
"""
RETURNED = "return responses"
SENT = "[request.get_response_sender().send(one, 1) for request, one in zip(requests, responses)]"


@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize("end", [RETURNED, SENT])
def test_a_triton_python_model(tmp_path: Path, execution: str, end: str) -> None:
    own = f'backend: "python" parameters {{ key: "execution" value: {{ string_value: "{execution}" }} }}'
    file = configured(tmp_path / "model", ROWS + own).with_name("model.py")
    file.parent.mkdir()
    file.write_text(TRITON.format(end=end))
    with serve(tmp_path) as client:
        metadata = metadata_of(client)
        assert [list(t.shape) for t in (*metadata.inputs, *metadata.outputs)] == [[-1, 1], [-1, 1]]
        arrays = [np.full((rows, 1), rows, "f4") for rows in (1, 2, 3)]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda array: infer(client, x=array), arrays))
    assert answers == [("FP32", [len(array), 1], (array + 1).tobytes()) for array in arrays]


STEP = """
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 6, 1 ] } } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 6, 1 ] } } ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: {batch}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] reshape {{ shape: [ {shape} ] }} }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] reshape {{ shape: [ {shape} ] }} }} ]
ensemble_scheduling {{ step {{
  model_name: "step" input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }}
}} }}
"""


@pytest.mark.parametrize(
    ("batch", "dims", "shape", "sent"),
    [
        (8, "3, 2", "6", (2, 3, 2)),
        (0, "2, 3, 2", "2, 6", (2, 3, 2)),
        (0, "-1, 3, 2", "-1, 6", (2, 3, 2)),
        # A batch of one for the step, and none for clients.
        (0, "3, 2", "6", (3, 2)),
    ],
)
def test_an_ensemble(tmp_path: Path, batch: int, dims: str, shape: str, sent: tuple[int, ...]) -> None:
    """Its tensors have `shape`, which are `dims` of the step, whose model has a third shape."""
    save_identity(configured(tmp_path / "step", STEP), "FLOAT", ["rows", 6, 1])
    configured(tmp_path / "model", ENSEMBLE.format(batch=batch, dims=dims, shape=shape))
    array = np.arange(math.prod(sent), dtype="f4").reshape(sent)
    with serve(tmp_path) as client:
        assert infer(client, x=array) == ("FP32", list(sent), array.tobytes())


def test_an_ensemble_whose_step_has_another_shape(tmp_path: Path) -> None:
    save_identity(tmp_path / "step" / "1" / "model.onnx", "FLOAT", [2, 3])
    configured(tmp_path / "model", ENSEMBLE.format(batch=0, dims="2, 3", shape="3, 2"))
    with pytest.raises(ModelLoadError) as caught, serve(tmp_path):
        pass
    problem = r"input_map\[x\]: 'step' has shape \[2,3\], input 'x' of the ensemble has \[3,2\]"
    with pytest.raises(ModelLoadError, match=problem):
        raise caught.value.__cause__ or caught.value
