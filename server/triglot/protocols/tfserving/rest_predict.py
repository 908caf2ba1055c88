"""`:predict` of TensorFlow Serving's REST interface: JSON ⇄ tensors (tfs 4.2, 4.3, 4.4). Pure functions.

Strategy: all values of an input are converted at once. If that fails, they are looked at one by one, for
TensorFlow Serving's text of the error. Small responses equal TensorFlow Serving's byte for byte; a numeric tensor
of more than `EXACT_ELEMENTS` elements is printed without blanks, in the fewest digits from which its values can be
read back.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Sequence
from typing import Any

from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.tensor import Array, Scattered, bytes_elements, native
from triglot.core.types import InputTensor, OutputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.limits import DEFAULT_LIMITS, JsonLimits
from triglot.protocols.json.text import print_array, print_nested, read_body, without_nulls
from triglot.protocols.tfserving.json_dialect import TFSERVING
from triglot.protocols.tfserving.json_models import SIGNATURE_NAME, instances_input, instances_of, read_object
from triglot.protocols.tfserving.json_numbers import decimal_texts
from triglot.protocols.tfserving.json_printer import (
    print_answer,
    print_line,
    print_lines,
    print_object,
    print_rows,
)
from triglot.protocols.tfserving.json_tensors import (
    RULES,
    NotDense,
    PredictBody,
    check_value,
    dense_tensor,
)
from triglot.protocols.tfserving.json_values import (
    body_error,
    debug_text,
    is_plain_object,
    quote,
    signature_name_of,
    text_of,
)
from triglot.protocols.tfserving.tensor import dtype_name

EXACT_ELEMENTS = 1024
"""A numeric tensor of more elements is printed compactly."""
ELEMENT_TEXT = 16
"""Cost of printing an element, in bytes of text read."""
_ROWS_END = b"\n    ]"
ROW_OF_BARE = "instances is a plain list, but expecting list of objects as multiple input tensors"
COLUMN_OF_BARE = "inputs is a plain value/list, but expecting an object as multiple input tensors"


def decode_predict(
    body: bytes,
    signature_of: Callable[[str], Signature],
    limits: JsonLimits = DEFAULT_LIMITS,
    *,
    columns: bool = True,
) -> PredictBody:
    """Return the request of a body. `signature_of` returns the signature of a name, "" being the default one.

    `columns`: `inputs` may take the place of `instances`. `signature_of` may be called twice; its errors come
    before any about the values, and after those about the JSON.

    Raise `InvalidArgument`; `PayloadTooLarge` for a body beyond `limits`; `Unimplemented` for columnar values of
    a datatype without a JSON form.
    """
    try:
        return read_body(body, None, lambda members: _read(members, signature_of, columns), limits, TFSERVING)
    except InvalidArgument:
        request = _read_as_json(body, signature_of, limits)
        if request is None:
            raise
        return request


def _read_as_json(body: bytes, signature_of: Callable[[str], Signature], limits: JsonLimits) -> PredictBody | None:
    """Return the request with the JSON of each instance, for a model that takes any inputs; None for others."""
    try:
        values = read_object(body, limits)
        instances, name = instances_of(values), values.get(SIGNATURE_NAME) or ""
        if not instances or not isinstance(name, str) or values.get("inputs") is not None:
            return None
        if not signature_of(name).any_inputs:
            return None
    except ServingError:
        return None
    return PredictBody(name, True, [instances_input(instances)], isinstance(instances[0], dict))


def _read(members: dict[str, Any], signature_of: Callable[[str], Signature], columns: bool) -> PredictBody:
    name = signature_name_of(members)
    signature = signature_of(name)
    specs = _guessed_specs(members, signature.inputs) if signature.any_tensors else signature.inputs
    if not specs or signature.takes_json:
        raise InvalidArgument(f"Failed to get input map for signature: {name or 'DEFAULT'}")
    if "instances" in members and "inputs" in members:
        members = without_nulls(members)
    if "instances" not in members:
        if not columns:
            got = ", got 'inputs'" if "inputs" in members else ""
            raise InvalidArgument(f"Missing 'instances' key{got}")
        if "inputs" not in members:
            raise InvalidArgument("Missing 'inputs' or 'instances' key")
        return PredictBody(name, False, _read_inputs(members["inputs"], specs))
    if "inputs" in members:
        raise body_error(
            members, "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
        )
    instances = members["instances"]
    if isinstance(instances, LargeArray):
        return PredictBody(name, True, [dense_tensor(instances, _bare(specs, ROW_OF_BARE))])
    if not isinstance(instances, list):
        raise body_error(members, "Expecting 'instances' to be an list/array")
    if not instances:
        raise body_error(members, "No values in 'instances' array")
    return PredictBody(name, True, _read_instances(instances, specs), is_plain_object(instances[0]))


def _guessed_specs(members: dict[str, Any], known: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return specs guessed from a body, for a model that takes any inputs.

    Numbers are FP32, as in grps' ndarray, unless the input is `known`. A bare tensor has no name.
    """
    given = members.get("inputs")
    rows = members.get("instances")
    if isinstance(rows, LargeArray):
        given = rows
    elif isinstance(rows, list) and rows:
        given = rows[0]
    if not is_plain_object(given):
        return [TensorSpec("", _datatype_of(given), None)]
    datatypes = {spec.name: spec.datatype for spec in known}
    return [
        TensorSpec(text_of(key), datatypes.get(key) or _datatype_of(value), None) for key, value in given.items()
    ]


def _datatype_of(value: Any) -> str:
    """Return the datatype by the first element."""
    while isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, bool):
        return "BOOL"
    return "FP32" if value is None or isinstance(value, int | float | LargeArray) else "BYTES"


def _read_inputs(value: Any, specs: Sequence[TensorSpec]) -> list[InputTensor]:
    """Read the columnar form: a tensor, or an object with one for each input."""
    if not is_plain_object(value):
        return [_read_column(value, _bare(specs, COLUMN_OF_BARE))]
    return [_read_member(value, spec) for spec in _expected(value, specs)]


def _bare(specs: Sequence[TensorSpec], error: str) -> TensorSpec:
    """Return the only input that values without a name can be for. Raise `InvalidArgument`."""
    specs = [spec for spec in specs if not spec.optional] or specs
    if len(specs) > 1:
        raise InvalidArgument(f"{error} required as per tensorinfo_map")
    return specs[0]


def _expected(given: dict[str, Any], specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the specs without the optional inputs that are not given."""
    return [spec for spec in specs if not spec.optional or spec.name in given]


def _read_member(members: dict[str, Any], spec: TensorSpec) -> InputTensor:
    if spec.name not in members:
        raise InvalidArgument(f"Missing named input: {spec.name} in 'inputs' object.")
    return _read_column(members[spec.name], spec)


def _read_column(value: Any, spec: TensorSpec) -> InputTensor:
    try:
        return dense_tensor(value, spec)
    except NotDense:
        check_value(value, spec.datatype)
        raise


def _read_instances(instances: list[Any], specs: Sequence[TensorSpec]) -> list[InputTensor]:
    """Read the row form: the instances' tensors, stacked; an optional input is in all instances, or none."""
    first = instances[0]
    if not is_plain_object(first):
        specs = [_bare(specs, ROW_OF_BARE)]
        columns = [instances]
        fits = not any(map(is_plain_object, instances))
    else:
        specs = _expected(first, specs)
        names = {spec.name for spec in specs}
        fits = all(is_plain_object(instance) and instance.keys() == names for instance in instances)
        columns = [[instance[spec.name] for instance in instances] for spec in specs] if fits else []
    try:
        if not fits:
            raise NotDense("instances of several kinds")
        return [dense_tensor(column, spec) for column, spec in zip(columns, specs, strict=True)]
    except NotDense:
        _check_instances(instances, specs)
        raise


def _check_instances(instances: list[Any], specs: Sequence[TensorSpec]) -> None:
    """Raise `InvalidArgument` for the first wrong instance."""
    named = is_plain_object(instances[0])
    datatypes = {spec.name: spec.datatype for spec in specs}
    shapes: dict[str, tuple[int, ...]] = {}
    for at, instance in enumerate(instances):
        if is_plain_object(instance) != named:
            mixed = "object but got list" if named else "value/list but got object"
            raise InvalidArgument(f"Expecting {mixed} at item {at} of input list")
        members = instance.items() if named else [(specs[0].name, instance)]
        for name, value in members:
            which = f"{at} key: {text_of(name)} of" if named else f"{at} of"
            try:
                if name not in datatypes:
                    raise InvalidArgument(f"JSON object: does not have named input: {text_of(name)}")
                shapes[name] = check_value(value, datatypes[name], shapes.get(name))
            except ServingError as error:
                raise InvalidArgument(
                    f"Failed to process element: {which} 'instances' list. "
                    f"Error: {error.code.name}: {error.message}"
                ) from None
        if len(members) != len(datatypes):
            raise InvalidArgument(
                f"Failed to process element: {at} of 'instances' list. JSON object: {debug_text(instance)} "
                f"keys must be equal to: {','.join(sorted(datatypes))}"
            )


def encode_predict(outputs: Sequence[OutputTensor], row: bool, *, named: bool = False) -> bytes:
    """Return the response to a request of the row or the columnar form.

    A single output is bare values, unless `named`. Raise `InvalidArgument` for no outputs, for a datatype without
    a JSON form and, in row form, for outputs without a common first dim.
    """
    if not outputs:
        raise InvalidArgument("Cannot convert empty tensor map to JSON")
    bare = len(outputs) == 1 and not named
    if row:
        _check_batch(outputs)
        return print_answer("predictions", _bare_rows(outputs[0]) if bare else _named_rows(outputs))
    if bare:
        return print_answer("outputs", _column(outputs[0], 1))
    columns = {output.name: _column(output, 2) for output in outputs}
    return print_answer("outputs", print_object(columns, 1))


def scatter_predict(outputs: Sequence[OutputTensor], row: bool) -> bytes | Scattered:
    """Return what `encode_predict` does, but do not join the text of one large tensor."""
    if len(outputs) != 1 or not _is_large(outputs[0]):
        return encode_predict(outputs, row)
    if row:
        _check_batch(outputs)
    pieces = print_nested(outputs[0].array)
    if row:
        pieces[-1:] = memoryview(pieces[-1])[:-1], _ROWS_END
    head, _, tail = print_answer("predictions" if row else "outputs", b"?").partition(b"?")
    return Scattered([head, *pieces, tail])


def text_size(outputs: Sequence[OutputTensor]) -> int:
    """Estimate how many bytes of text are printed: if many, this runs off the event loop."""
    if len(outputs) == 1 and _is_large(outputs[0]):
        # 0.3 ms for 16,000 numbers, as in KServe V2.
        return outputs[0].array.nbytes
    return sum([output.array.size for output in outputs]) * ELEMENT_TEXT


def encode_error(text: str) -> bytes:
    """Return the body of an error."""
    return print_answer("error", quote(text.encode(errors="replace")))


def _check_batch(outputs: Sequence[OutputTensor]) -> None:
    batch: int | None = None
    for output in outputs:
        shape = output.array.shape
        if not shape:
            raise InvalidArgument(f"Tensor name: {output.name} has no shape information ")
        if batch not in (None, shape[0]):
            raise InvalidArgument(
                f"Tensor name: {output.name} has inconsistent batch size: {shape[0]} expecting: {batch}"
            )
        batch = shape[0]


def _bare_rows(output: OutputTensor) -> bytes:
    if _is_large(output):
        return b"".join(print_nested(output.array))[:-1] + _ROWS_END
    return print_rows(_rows(output, 2))


def _named_rows(outputs: Sequence[OutputTensor]) -> bytes:
    names = [output.name for output in outputs]
    columns = [_rows(output, 3) for output in outputs]
    rows = [print_object(dict(zip(names, texts, strict=True)), 2) for texts in zip(*columns, strict=True)]
    return print_lines(rows, 1)


def _is_large(output: OutputTensor) -> bool:
    return output.array.size > EXACT_ELEMENTS and output.datatype in RULES and output.datatype != "BYTES"


def _rows(output: OutputTensor, level: int) -> list[bytes]:
    """Return the text of each item of the first dim, on one line, at `level`."""
    array = output.array
    texts = _element_texts(output, level + array.ndim - 1)
    for depth in range(array.ndim - 1, 0, -1):
        texts = [print_line(items) for items in _lists(texts, array.shape, depth)]
    return texts


def _column(output: OutputTensor, level: int) -> bytes:
    """Return the text of a tensor at `level`, an item a line."""
    array = output.array
    if _is_large(output):
        return b"".join(print_nested(array))
    texts = _element_texts(output, level + array.ndim)
    for depth in range(array.ndim - 1, -1, -1):
        texts = [print_lines(items, level + depth) for items in _lists(texts, array.shape, depth)]
    return texts[0]


def _lists(texts: list[bytes], shape: tuple[int, ...], depth: int) -> list[list[bytes]]:
    """Return the items of each list at nesting depth `depth`."""
    size = shape[depth]
    return [texts[at * size : (at + 1) * size] for at in range(math.prod(shape[:depth]))]


def _element_texts(output: OutputTensor, level: int) -> list[bytes]:
    """Return the text of each element, at `level`."""
    array: Array = output.array
    if not array.size:
        return []
    if output.datatype not in RULES:
        raise InvalidArgument(f"Failed to write JSON value for tensor type: {dtype_name(output.datatype)}")
    if output.datatype == "BYTES":
        elements = bytes_elements(array)
        if output.name.endswith("_bytes"):
            return [print_object({"b64": _base64(element)}, level) for element in elements]
        return [quote(element) for element in elements]
    if _is_large(output):
        return b"".join(print_array(array))[1:-1].split(b",")
    flat = native(array).reshape(-1)
    if flat.dtype.kind == "f":
        return " ".join(decimal_texts(flat)).encode().split()
    return [str(value).lower().encode() for value in flat.tolist()]


def _base64(element: bytes) -> bytes:
    return b'"' + binascii.b2a_base64(element, newline=False) + b'"'
