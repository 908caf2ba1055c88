"""Fits the demo's two classifiers: writes the files of `digits`, and checks the numbers in the code of `iris`.

    python codegen/demo_models.py [--check]

Both are linear discriminants of data that comes with scikit-learn: Fisher's irises, and the UCI's images of
handwritten digits. `digits` takes `image` FP32 [-1, 1, 8, 8], from 0 for paper to 1 for ink, and returns
`probabilities` FP32 [-1, 10]. The environment `ml` of `tests/environments.py` has what this imports.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits, load_iris
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from triglot.run import DEMO

DIGITS, IRIS = DEMO / "digits", DEMO / "iris" / "model.py"
ONNX, THREE = DIGITS / "1" / "model.onnx", DIGITS / "warmup" / "three"
DECIMALS = 2
SLACK = 0.011
"""Linear algebra differs from machine to machine in the last bits: a number may be rounded the other way."""
Numbers = NDArray[np.float64]


def fitted(x: Numbers, y: Any, **options: Any) -> tuple[Numbers, Numbers]:
    """The discriminants' weights [class, feature] and biases [class], rounded."""
    model = LinearDiscriminantAnalysis(**options).fit(x, y)
    return np.round(model.coef_, DECIMALS), np.round(model.intercept_, DECIMALS)


def digits() -> tuple[onnx.ModelProto, bytes]:
    """The model, and the first image of a three."""
    x, y = load_digits(return_X_y=True)
    x = x / x.max()
    weights, bias = fitted(x, y, solver="lsqr", shrinkage=0.05)
    nodes = [
        helper.make_node("Flatten", ["image"], ["pixels"]),
        helper.make_node("Gemm", ["pixels", "weights", "bias"], ["scores"], transB=1),
        helper.make_node("Softmax", ["scores"], ["probabilities"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", len(bias)])],
        [
            numpy_helper.from_array(weights.astype(np.float32), "weights"),
            numpy_helper.from_array(bias.astype(np.float32), "bias"),
        ],
    )
    # Versions that the oldest onnxruntime we admit can read.
    model = helper.make_model(
        graph, producer_name="triglot", ir_version=8, opset_imports=[helper.make_opsetid("", 17)]
    )
    onnx.checker.check_model(model, full_check=True)
    return model, x[np.argmax(y == 3)].astype("<f4").tobytes()


def numbers(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """The weights, by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def are_like(model: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """Whether two models differ in roundings at most."""
    ours, theirs = numbers(model), numbers(other)
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return False
    shapes = onnx.ModelProto(), onnx.ModelProto()
    for shape, source in zip(shapes, (model, other), strict=True):
        shape.CopyFrom(source)
        del shape.graph.initializer[:]
    return shapes[0] == shapes[1] and all(np.allclose(ours[name], theirs[name], atol=SLACK) for name in ours)


def check_iris() -> str:
    """What is wrong with the numbers in the code."""
    known = runpy.run_path(str(IRIS))
    weights, bias = fitted(*load_iris(return_X_y=True))
    if np.allclose(known["WEIGHTS"], weights, atol=SLACK) and np.allclose(known["BIAS"], bias, atol=SLACK):
        return ""
    return f"{IRIS}: expected WEIGHTS {weights.tolist()} and BIAS {bias.tolist()}"


def main() -> int:
    """Write the files of `digits`, or with --check compare them; 1 when one differs."""
    model, three = digits()
    wrong = [problem] if (problem := check_iris()) else []
    if "--check" not in sys.argv[1:]:
        for file, content in ((ONNX, model.SerializeToString(deterministic=True)), (THREE, three)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    elif not are_like(onnx.load(ONNX), model) or THREE.read_bytes() != three:
        wrong.append(f"{DIGITS} is not what codegen/demo_models.py makes; run it again")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
