"""Triton's generate routes: flat JSON ⇄ requests and responses (spec 3.8). Pure functions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import dumps
from triglot.core.tensor import Buffer
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, ParameterValue
from triglot.model.signature import Signature, shape_text
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.dialect import DEFAULT_LIMITS, JsonLimits, type_name
from triglot.protocols.json.text import read_body
from triglot.protocols.kserve.codec import MAX_PARAMETERS
from triglot.protocols.kserve.json_elements import NO_JSON, elements_of_json, json_of_elements, print_json
from triglot.protocols.kserve.parameters import set_parameters
from triglot.protocols.wire import limit_error

ID, INPUTS, PARAMETERS, SIGNATURE = "id", "inputs", "parameters", "signature_name"
_STRING = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?', re.DOTALL)
"""A JSON string, and the colon that makes it a member's name."""
EMPTY_FINAL = "triton_enable_empty_final_response"


def decode_generate(
    body: bytes,
    model_name: str,
    model_version: str,
    signature_of: Callable[[str], Signature],
    limits: JsonLimits = DEFAULT_LIMITS,
) -> InferenceRequest | None:
    """Return the request of a body: a member with the name of an input is that input, any other a parameter.

    The members of `parameters` count like those around it. `signature_of` returns the signature of a name, ""
    being the default one. Return None for a body of infer, whose inputs are a list of objects, as MLServer's
    clients send. Raise `InvalidArgument`, `PayloadTooLarge` beyond `limits`, and as `signature_of`.
    """

    def read(members: dict[str, Any]) -> InferenceRequest | None:
        inputs = members.get(INPUTS)
        if isinstance(inputs, list) and inputs and isinstance(inputs[0], dict):
            return None
        signature = signature_of("")
        name = members.get(SIGNATURE)
        if isinstance(name, str) and name and SIGNATURE not in signature.input_rules:
            signature = signature_of(name)
        _check_inputs(signature, model_name)
        signature = declared(signature)
        reader = _Reader(signature)
        nested = _object(members.get(PARAMETERS))
        for key, value in members.items():
            if key != PARAMETERS:
                reader.add(key, value)
        for key, value in nested.items():
            reader.add(key, value)
        _check_duplicates(body, len(members) + len(nested), signature)
        request = InferenceRequest(model_name, model_version, reader.id, reader.inputs)
        if EMPTY_FINAL in reader.parameters:
            raise InvalidArgument(f"parameter '{EMPTY_FINAL}' is not allowed over HTTP")
        set_parameters(request, reader.parameters)
        return request

    return read_body(body, None, read, limits)


def declared(signature: Signature) -> Signature:
    """Return the signature of a model that takes any tensors, with the datatypes that it declares for them."""
    return replace(signature, any_tensors=False) if signature.any_tensors else signature


def _check_inputs(signature: Signature, model_name: str) -> None:
    if signature.any_tensors and not signature.inputs:
        raise InvalidArgument(
            f"model '{model_name}' declares no inputs, so generate cannot find the tensors in the body; use infer"
        )
    if PARAMETERS in signature.input_rules:
        raise InvalidArgument(
            f"model '{model_name}' has an input named '{PARAMETERS}', a name that generate reserves; use infer"
        )


def _check_duplicates(body: bytes, members: int, signature: Signature) -> None:
    """Raise `InvalidArgument` for a repeated key, of which parsers keep the last.

    `members` is how many they kept.
    """
    if body.count(b":") == members:  # No string has a colon, and no key was dropped.
        return
    names = (json.loads(b'"%b"' % string[1]) for string in _STRING.finditer(body) if string[2])
    # Among one more name than were kept, one is a duplicate.
    for name, count in Counter(islice(names, members + 1)).items():
        if count > 1:
            what = "input" if name in signature.input_rules else "parameter"
            raise InvalidArgument(f"{what} '{name}' already exists in request")


def _object(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"'{PARAMETERS}' must be an object, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "an array" if isinstance(value, LargeArray) else type_name(value)


@dataclass(slots=True)
class _Reader:
    """Sorts members into inputs and parameters."""

    signature: Signature
    id: str = ""
    inputs: list[InputTensor] = field(default_factory=list)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)

    def add(self, key: str, value: Any) -> None:
        rule = self.signature.input_rules.get(key)
        if value is None:
            pass  # As if it were absent.
        elif rule is not None:
            self.inputs.append(_input(key, rule.spec.datatype, rule.spec.shape, value))
        elif key == ID:
            self.id = _text(value)
        elif not isinstance(value, bool | int | float | str):
            raise InvalidArgument(
                f"parameter '{key}' must be a string, number or boolean, got {_kind(value)}; the model's inputs "
                f"are {list(self.signature.input_rules)}"
            )
        elif key in self.parameters:
            raise InvalidArgument(f"parameter '{key}' is both in the body and in its '{PARAMETERS}'")
        elif len(self.parameters) == MAX_PARAMETERS.count:
            raise limit_error(MAX_PARAMETERS)
        else:
            self.parameters[key] = value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"'{ID}' must be a string, got {_kind(value)}")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgument(f"'{ID}' is not Unicode text: {value!a}")
    return value


def _input(name: str, datatype: str, declared: Any, value: Any) -> InputTensor:
    what = f"input '{name}'"
    if datatype in NO_JSON:
        raise InvalidArgument(f"{what}: {datatype} has no JSON form; use infer, with binary data")
    if isinstance(value, LargeArray):
        dims = value.shape
        nested, count = len(dims) > 1, dims[0]
    elif isinstance(value, list):
        nested, count = any(isinstance(item, list) for item in value), len(value)
    elif isinstance(value, dict):
        raise InvalidArgument(f"{what} must be a value or an array of values, got an object")
    else:
        shape = () if declared is None else shape_for(1, declared, name)
        return InputTensor(name, datatype, shape, elements_of_json([value], datatype, shape, what, ""))
    if nested:
        raise InvalidArgument(f"{what} must be a value or an array of values, got an array of arrays")
    shape = (count,) if declared is None else shape_for(count, declared, name)
    return InputTensor(name, datatype, shape, elements_of_json(value, datatype, shape, what, ""))


def shape_for(count: int, declared: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return the shape of `count` elements: the innermost -1 is what the fixed dims leave, any other -1 is 1.

    Raise `InvalidArgument` if no such shape has that many elements.
    """
    fixed = 1
    for dim in declared:
        fixed *= dim if dim != -1 else 1
    left, rest = divmod(count, fixed) if fixed else (1, count)
    innermost = max((at for at, dim in enumerate(declared) if dim == -1), default=None)
    if rest or (innermost is None and left != 1):
        raise InvalidArgument(
            f"The schema can not convert input '{name}' to tensor with proper shape: it has {count} elements, the "
            f"model takes {shape_text(declared)}"
        )
    return tuple([left if at == innermost else 1 if dim == -1 else dim for at, dim in enumerate(declared)])


def encode_generate(response: InferenceResponse) -> bytes:
    """Return an object with the response's parameters and outputs by name; an output of one element is a scalar.

    Raise `InvalidArgument` for an output that has no JSON form.
    """
    members: dict[str, Sequence[Buffer]] = {
        "model_name": [print_json(response.model_name)],
        "model_version": [print_json(response.model_version)],
    }
    if response.id:
        members[ID] = [print_json(response.id)]
    members |= {key: [print_json(value)] for key, value in response.parameters.items()}
    members |= {output.name: _value(output) for output in response.outputs}
    pieces: list[Buffer] = []
    for key, texts in members.items():
        pieces += b"," if pieces else b"{", print_json(key), b":", *texts
    return b"".join([*pieces, b"}"])


def _value(output: OutputTensor) -> Sequence[Buffer]:
    texts = json_of_elements(output)
    return [b"".join(texts)[1:-1]] if output.array.size == 1 else texts


def encode_error(text: str) -> bytes:
    """Return the data of an error event."""
    return dumps({"error": text})


def encode_event(data: bytes) -> bytes:
    """Return a server-sent event with JSON on one line."""
    return b"data: " + data + b"\n\n"
