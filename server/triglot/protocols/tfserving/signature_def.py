"""Signatures as `tensorflow.SignatureDef` messages (tfs 3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.pb.tfserving import metadata_pb2, signature_pb2
from triglot.protocols.tfserving.tensor import TYPES, tensor_message

METHOD_NAMES = {
    "predict": "tensorflow/serving/predict",
    "classify": "tensorflow/serving/classify",
    "regress": "tensorflow/serving/regress",
}


def signature_def(name: str, signature: Signature, given: Mapping[str, bytes]) -> signature_pb2.SignatureDef:
    """Returns a signature's SignatureDef: the one in the model's file (`given`), or one made of the signature."""
    if name in given:
        return signature_pb2.SignatureDef.FromString(given[name])
    message = signature_pb2.SignatureDef(method_name=METHOD_NAMES[signature.method])
    _fill_infos(message.inputs, signature.inputs)
    _fill_infos(message.outputs, signature.outputs)
    for alias, value in signature.defaults.items():
        message.defaults[alias].CopyFrom(tensor_message(value, signature.input_rules[alias].spec.datatype))
    return message


def _fill_infos(infos: Any, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        info = infos[spec.name]
        info.name = f"{spec.name}:0"
        info.dtype = TYPES[spec.datatype]
        if spec.shape is None:
            info.tensor_shape.unknown_rank = True
        else:
            info.tensor_shape.SetInParent()
            for dim in spec.shape:
                info.tensor_shape.dim.add(size=dim)


def signature_def_map(signatures: Mapping[str, Signature], given: Mapping[str, bytes]) -> Any:
    """Returns all signatures of a model, including those of its file that cannot be called."""
    message = metadata_pb2.SignatureDefMap()
    for name, signature in signatures.items():
        message.signature_def[name].CopyFrom(signature_def(name, signature, given))
    for name, data in given.items():
        message.signature_def[name].CopyFrom(signature_pb2.SignatureDef.FromString(data))
    return message
