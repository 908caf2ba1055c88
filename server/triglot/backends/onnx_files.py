"""What an ONNX model file holds and onnxruntime's Python API neither reports nor returns.

onnxruntime reports the shape [] both for a scalar and for a tensor of unknown rank, and returns the probabilities
of exported classifiers as a Python dict for each row. The file tells the ranks, and which tensor these dicts are
made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triglot.pb.onnx import model_pb2 as pb

FLOAT = 1
"""onnx.TensorProto.FLOAT."""


@dataclass(frozen=True, slots=True)
class Probabilities:
    """The tensor that an output of maps is made of: FP32 [rows, labels], its columns in the order of `labels`."""

    tensor: str
    labels: Sequence[bytes]


def scalars_of(file: Path) -> frozenset[str]:
    """Return the names of the inputs and outputs that the file declares as tensors of rank 0."""
    graph = pb.ModelProto.FromString(file.read_bytes()).graph
    return frozenset(
        value.name
        for value in (*graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape") and not value.type.tensor_type.shape.dim
    )


def without_maps(file: Path) -> tuple[bytes, dict[str, Probabilities]]:
    """Return the model without ZipMap nodes, and the tensors that replace their maps, by output.

    skl2onnx and onnxmltools add such a node unless they are told zipmap=False, and CatBoost always. It returns
    a sequence of maps from labels to probabilities, one for each row (ai.onnx.ml, ZipMap).
    """
    model = pb.ModelProto.FromString(file.read_bytes())
    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    found: dict[str, Probabilities] = {}
    for node in [node for node in graph.node if (node.op_type, node.domain) == ("ZipMap", "ai.onnx.ml")]:
        name, tensor = node.output[0], node.input[0]
        if (output := outputs.pop(name, None)) is None:
            continue
        probabilities = Probabilities(tensor, _labels(node))
        graph.node.remove(node)
        if tensor in outputs:  # It is returned anyway.
            graph.output.remove(output)
            found[tensor] = probabilities
            continue
        found[name] = probabilities
        outputs[tensor] = output
        output.name = tensor
        output.type.Clear()
        output.type.tensor_type.elem_type = FLOAT
        output.type.tensor_type.shape.dim.add()
        output.type.tensor_type.shape.dim.add(dim_value=len(probabilities.labels))
    return model.SerializeToString(), found


def _labels(node: pb.NodeProto) -> list[bytes]:
    """Return the labels of a ZipMap node, which are either integers or strings."""
    values = {attribute.name: attribute for attribute in node.attribute}
    if "classlabels_strings" in values:
        return list(values["classlabels_strings"].strings)
    return [b"%d" % label for label in values["classlabels_int64s"].ints]
