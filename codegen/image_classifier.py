"""Makes the demo's ONNX model: shaped like an image classifier, with weights that classify nothing.

    python codegen/image_classifier.py [--check]

Input `image` FP32 [-1, 3, 224, 224], output `scores` FP32 [-1, 1000]: a convolution, an average and a softmax.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FILE = Path(__file__).parent.parent / "server" / "triglot" / "demo" / "image_classifier" / "1" / "model.onnx"
CHANNELS, CLASSES = 8, 1000


def weights(*shape: int) -> NDArray[np.float32]:
    """Small numbers that are the same on every machine."""
    count = int(np.prod(shape))
    return (((np.arange(count) * 37) % 101 - 50) / np.float32(64)).astype(np.float32).reshape(shape)


def build() -> bytes:
    """The serialized model."""
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["edges"], strides=[8, 8], kernel_shape=[8, 8]),
        helper.make_node("Relu", ["edges"], ["positive"]),
        helper.make_node("GlobalAveragePool", ["positive"], ["average"]),
        helper.make_node("Flatten", ["average"], ["features"]),
        helper.make_node("Gemm", ["features", "projection", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "image_classifier",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [
            numpy_helper.from_array(weights(CHANNELS, 3, 8, 8), "kernel"),
            numpy_helper.from_array(weights(CHANNELS, CLASSES), "projection"),
            numpy_helper.from_array(weights(CLASSES), "bias"),
        ],
    )
    # Versions that the oldest onnxruntime we admit can read.
    model = helper.make_model(
        graph, producer_name="triglot", ir_version=8, opset_imports=[helper.make_opsetid("", 17)]
    )
    onnx.checker.check_model(model, full_check=True)
    serialized: bytes = model.SerializeToString(deterministic=True)
    return serialized


def main() -> int:
    """Write the model, or with --check compare it; 1 when it differs."""
    built = build()
    if "--check" not in sys.argv[1:]:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_bytes(built)
    elif not FILE.exists() or FILE.read_bytes() != built:
        print(f"{FILE} is not what codegen/image_classifier.py makes; run it again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
