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
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import InvalidArgument, ServingError, Unimplemented
from triglot.core.tensor import DATATYPES, Array, Scattered, bytes_elements, object_array
from triglot.core.types import InputTensor, OutputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.dialect import DEFAULT_LIMITS, JsonLimits
from triglot.protocols.json.text import dense, float32_array, print_array, print_nested, read_body, without_nulls
from triglot.protocols.tfserving.json_dialect import (
    SIGNATURE_NAME,
    TFSERVING,
    instances_input,
    instances_of,
    read_object,
)
from triglot.protocols.tfserving.json_printer import (
    base64_text,
    body_error,
    debug_text,
    decimal_texts,
    decode_base64,
    is_plain_object,
    json_type,
    print_answer,
    print_line,
    print_lines,
    print_object,
    print_rows,
    quote,
    raw,
    signature_name_of,
    text_of,
)
from triglot.protocols.tfserving.tensor import MAX_DIMS, dtype_name

EXACT_ELEMENTS: Final = 1024
"""A numeric tensor of more elements is printed compactly."""
ELEMENT_TEXT: Final = 16
"""Cost of printing an element, in bytes of text read."""
_ROWS_END: Final = b"\n    ]"
ROW_OF_BARE: Final = "instances is a plain list, but expecting list of objects as multiple input tensors"
COLUMN_OF_BARE: Final = "inputs is a plain value/list, but expecting an object as multiple input tensors"


@dataclass(frozen=True, slots=True)
class PredictBody:
    """A decoded `:predict` body.

    `row`: it has the row form, and so has the response. `named`: its rows are objects by input name.
    """

    signature_name: str
    row: bool
    inputs: list[InputTensor]
    named: bool = False


# --- JSON values → tensors ---


@dataclass(frozen=True, slots=True)
class ElementRule:
    """The Python types, and for integers the inclusive bounds, of a datatype's elements."""

    types: frozenset[type]
    low: int | None = None
    high: int | None = None

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether all values are valid elements."""
        if not self.types.issuperset(map(type, values)):
            return False
        if self.low is None or self.high is None or not values:
            return True
        lowest: int = min(values)
        highest: int = max(values)
        return self.low <= lowest and highest <= self.high


_NUMBER: Final = ElementRule(frozenset({int, float}))
# Narrow types are converted by way of int32, and wrap around.
_INT32: Final = ElementRule(frozenset({int}), -(2**31), 2**31 - 1)
RULES: Final[dict[str, ElementRule]] = {
    "FP32": _NUMBER,
    "FP64": _NUMBER,
    "INT32": _INT32,
    "INT16": _INT32,
    "INT8": _INT32,
    "UINT8": _INT32,
    "INT64": ElementRule(frozenset({int}), -(2**63), 2**63 - 1),
    "UINT32": ElementRule(frozenset({int}), 0, 2**32 - 1),
    "UINT64": ElementRule(frozenset({int}), 0, 2**64 - 1),
    "BOOL": ElementRule(frozenset({bool})),
    "BYTES": ElementRule(frozenset({str})),
}
"""Rules of the datatypes that have a JSON form here; elements of others are rejected."""


def to_array(values: list[Any], datatype: str) -> Array:
    """Return a flat array of values that passed the datatype's rule.

    A number beyond FP32's range becomes infinite.
    """
    dtype = DATATYPES[datatype].dtype
    if datatype == "BYTES":
        return object_array(values, (len(values),))
    if datatype == "FP32":
        return float32_array(values)
    if dtype.kind == "f":
        return _narrowed(np.array(values, np.float64), datatype)
    if dtype.kind in "iu":
        return _narrowed(np.array(values, np.uint64 if datatype == "UINT64" else np.int64), datatype)
    return np.array(values, dtype)


def _narrowed(numbers: Array, datatype: str) -> Array:
    with np.errstate(over="ignore"):
        return numbers.astype(DATATYPES[datatype].dtype, copy=False)


@mypyc_attr(native_class=False)
class NotDense(ValueError):
    """Values are no tensor; `check_value` says why."""


def dense_tensor(value: Any, spec: TensorSpec) -> InputTensor:
    """Return the tensor of nested lists of elements, or of one element.

    Raise `ValueError`, `TypeError` or `RuntimeError` for a `LargeArray` that has to be read as plain lists;
    `NotDense` for plain values that `check_value` rejects; `InvalidArgument` for too many dims.
    """
    datatype = spec.datatype
    if isinstance(value, LargeArray):
        shape, elements = _large(value, datatype)
    elif isinstance(value, list) and value and isinstance(value[0], LargeArray):
        shape, elements = _stacked(value, datatype)
    else:
        try:
            shape, values = dense(value)
            elements = _elements(values, datatype)
        except ValueError as error:
            raise NotDense(str(error)) from None
    _check_rank(shape)
    return InputTensor(spec.name, datatype, shape, elements)


def _large(value: LargeArray, datatype: str) -> tuple[tuple[int, ...], Array]:
    kind = DATATYPES[datatype].dtype.kind
    if datatype not in RULES or kind not in "fiu":
        raise TypeError("no datatype of numbers")
    shape, numbers = value.dense("d" if kind == "f" else "u" if datatype == "UINT64" else "i")
    if kind != "f" and not RULES[datatype].takes([int(numbers.min()), int(numbers.max())]):
        raise ValueError("beyond the datatype's range")
    return shape, _narrowed(numbers, datatype)


def _stacked(values: list[Any], datatype: str) -> tuple[tuple[int, ...], Array]:
    if set(map(type, values)) != {LargeArray}:
        raise TypeError("not only lists of numbers")
    shapes, arrays = zip(*[_large(value, datatype) for value in values], strict=True)
    if len(set(shapes)) > 1:
        raise ValueError("lists of unequal lengths")
    return (len(values), *shapes[0]), np.concatenate(arrays)


def _elements(values: list[Any], datatype: str) -> Array:
    if datatype == "BYTES":
        return to_array([_bytes_of(value) for value in values], datatype)
    if values and not (datatype in RULES and RULES[datatype].takes(values)):
        raise ValueError("not elements of the datatype")
    return to_array(values, datatype)


def _bytes_of(value: Any) -> bytes:
    """Return the element of a string, or of base64. Raise `ValueError`."""
    if isinstance(value, str):
        return raw(value)
    text = base64_text(value)
    if text is None:
        raise ValueError("neither a string nor base64")
    try:
        return decode_base64(text)
    except InvalidArgument as error:
        raise ValueError(error.message) from None


def check_value(value: Any, datatype: str, expected: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of plain nested lists of elements.

    Raise `InvalidArgument` for a value that is not a dense tensor of the datatype, or whose shape is not the
    expected one, `Unimplemented` for a datatype without a JSON form.
    """
    shape = _shape(value)
    _check_items(value, 0, shape, datatype)
    if expected is not None and shape != expected:
        if prod(shape) != prod(expected):
            raise InvalidArgument(f"Expecting tensor size: {prod(expected)} but got: {prod(shape)}")
        raise InvalidArgument(f"Expecting shape {_shape_text(expected)} but got: {_shape_text(shape)}")
    return shape


def _shape(value: Any) -> tuple[int, ...]:
    """Return the dims by the first item of each level. Raise `InvalidArgument` for more than an array can have."""
    dims: list[int] = []
    while isinstance(value, list):
        dims.append(len(value))
        if not value:
            break
        value = value[0]
    _check_rank(dims)
    return tuple(dims)


def _check_rank(shape: Sequence[int]) -> None:
    if len(shape) > MAX_DIMS:
        raise InvalidArgument(f"Lists are nested too deep: {len(shape)} dims, the limit is {MAX_DIMS}")


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _check_items(value: Any, level: int, shape: tuple[int, ...], datatype: str) -> None:
    """Raise the error of the first wrong item; recursion is limited by the number of dims."""
    rank = len(shape)
    if not isinstance(value, list):
        if level != rank:
            raise InvalidArgument(
                f"JSON Value: {debug_text(value)} found at incorrect level: {level + 1} in the JSON DOM. "
                f"Expected at level: {rank}"
            )
        _check_element(value, datatype)
        return
    if level >= rank:
        raise InvalidArgument(f"Encountered list at unexpected level: {level} expected < {rank}")
    if len(value) != shape[level]:
        raise InvalidArgument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    if level == rank - 1 and datatype in RULES and RULES[datatype].takes(value):
        return
    for item in value:
        _check_items(item, level + 1, shape, datatype)


def _check_element(value: Any, datatype: str) -> None:
    if isinstance(value, dict):
        if datatype != "BYTES":
            raise _type_error(value, datatype)
        text = base64_text(value)
        if text is None:
            raise InvalidArgument(f"JSON Value: {debug_text(value)} not formatted correctly for base64 data")
        decode_base64(text)
    elif datatype not in RULES:
        raise Unimplemented(f"Conversion of JSON Value: {debug_text(value)} to type: {dtype_name(datatype)}")
    elif not RULES[datatype].takes([value]):
        raise _type_error(value, datatype)


def _type_error(value: Any, datatype: str) -> ServingError:
    return InvalidArgument(
        f"JSON Value: {debug_text(value)} Type: {json_type(value)} is not of expected type: {dtype_name(datatype)}"
    )


# --- requests ---


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
        request = _read_as_json(body, signature_of, limits, columns)
        if request is None:
            raise
        return request


def _read_as_json(
    body: bytes, signature_of: Callable[[str], Signature], limits: JsonLimits, columnar: bool
) -> PredictBody | None:
    """Return the request with the JSON of each instance, for a model that takes any inputs; None for others."""
    try:
        values = read_object(body, limits)
        columns, name = values.get("inputs"), values.get(SIGNATURE_NAME) or ""
        if not isinstance(name, str) or not signature_of(name).any_inputs:
            return None
        if columns is not None:
            rows = _rows_of(columns) if columnar and "instances" not in values else None
            return None if rows is None else PredictBody(name, False, [instances_input(rows)])
        instances = instances_of(values)
    except ServingError:
        return None
    if not instances:
        return None
    return PredictBody(name, True, [instances_input(instances)], isinstance(instances[0], dict))


def _rows_of(columns: object) -> list[Any] | None:
    """Return the instances of the columnar form: of one matrix of any name, or of columns by name."""
    if not isinstance(columns, dict) or not columns:
        return None
    if not all(isinstance(column, list) and column for column in columns.values()):
        return None
    matrix: list[Any] = next(iter(columns.values()))
    if len(columns) == 1 and isinstance(matrix[0], list):
        return matrix
    return [{name: [_of_one(value) for value in column] for name, column in columns.items()}]


def _of_one(value: Any) -> Any:
    """Return the only element of a list: a column may have a second dim of 1."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


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
        return PredictBody(name, False, _read_inputs(members["inputs"], specs, signature.unnamed))
    if "inputs" in members:
        raise body_error(
            members, "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
        )
    instances = members["instances"]
    if isinstance(instances, LargeArray):
        return PredictBody(name, True, [dense_tensor(instances, signature.unnamed or _bare(specs, ROW_OF_BARE))])
    if not isinstance(instances, list):
        raise body_error(members, "Expecting 'instances' to be an list/array")
    if not instances:
        raise body_error(members, "No values in 'instances' array")
    inputs = _read_instances(instances, specs, signature.unnamed)
    if signature.any_inputs and any(map(_is_table, inputs, specs)):
        raise InvalidArgument("expected one value for each column of an instance, got several")
    return PredictBody(name, True, inputs, is_plain_object(instances[0]))


def _is_table(tensor: InputTensor, spec: TensorSpec) -> bool:
    """Whether a column of scalars has more than one value in each row: KServe V1 takes each row for a table."""
    return spec.shape == (-1,) and tensor.name == spec.name and tensor.shape[1:] not in ((), (1,))


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


def _read_inputs(value: Any, specs: Sequence[TensorSpec], unnamed: TensorSpec | None) -> list[InputTensor]:
    """Read the columnar form: a tensor, or an object with one for each input."""
    if not is_plain_object(value):
        return [_read_column(value, unnamed or _bare(specs, COLUMN_OF_BARE))]
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


def _read_instances(
    instances: list[Any], specs: Sequence[TensorSpec], unnamed: TensorSpec | None
) -> list[InputTensor]:
    """Read the row form: the instances' tensors, stacked; an optional input is in all instances, or none."""
    first = instances[0]
    if not is_plain_object(first):
        specs = [unnamed or _bare(specs, ROW_OF_BARE)]
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


# --- responses ---


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
    flat = array.reshape(-1)
    if flat.dtype.kind == "f":
        return decimal_texts(flat)
    return [str(value).lower().encode() for value in flat.tolist()]


def _base64(element: bytes) -> bytes:
    return b'"' + binascii.b2a_base64(element, newline=False) + b'"'
