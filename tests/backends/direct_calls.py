"""Calls of a model without a server, held against what the model declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import triglot
from triglot.core.call import Call
from triglot.core.tensor import object_array
from triglot.core.types import TensorSpec
from triglot.executors.work import takes_call
from triglot.model.model import signatures_of
from triglot.model.signature import DEFAULT_SIGNATURE


def tensor(values: Any) -> Any:
    """An array as a request brings it: texts are bytes, and nothing can be written to."""
    array = np.array(values)
    if array.dtype.kind in "OU":
        array = object_array([str(value).encode() for value in array.ravel()], array.shape)
    array.flags.writeable = False
    return array


def infer(model: triglot.Model, signature: str = "", parameters: Any = None, **inputs: Any) -> Any:
    """The one output of the signature that is called."""
    call = Call()
    call.signature_name = signature
    call.parameters = parameters or {}
    declared = signatures_of(model)[signature or DEFAULT_SIGNATURE]
    assert declared.input_rules.keys() == inputs.keys()
    tensors = {name: tensor(values) for name, values in inputs.items()}
    for name, rule in declared.input_rules.items():
        assert rule.fits(tensors[name].shape)
        assert tensors[name].dtype == rule.dtype
    answer = model.infer(tensors, call) if takes_call(model) else model.infer(tensors)
    ((name, array),) = answer.items()
    (rule,) = declared.output_rules.values()
    assert name == rule.spec.name
    assert array.dtype == rule.dtype or (rule.dtype.hasobject and array.dtype.kind in "OU")
    assert rule.fits(array.shape)
    return array


def send(model: triglot.Model, inputs: Mapping[str, Any], parameters: Any = None, signature: str = "") -> Any:
    """The one output for inputs that need not be as they are declared, nor it with parameters."""
    call = Call()
    call.signature_name = signature
    call.parameters = parameters or {}
    (array,) = model.infer({name: tensor(values) for name, values in inputs.items()}, call).values()
    return array


def described(specs: Iterable[TensorSpec]) -> list[tuple[str, str, list[int]]]:
    """Name, datatype and shape of each."""
    return [(spec.name, spec.datatype, list(spec.shape or ())) for spec in specs]
