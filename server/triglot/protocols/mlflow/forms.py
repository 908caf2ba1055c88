"""The bodies of MLflow's /invocations ⇄ tensors and rows. Pure functions.

Strategy: columns and tensors of numbers become inputs. Everything else goes to models of any inputs as
`instances`, the JSON of each row: the model knows which text is a date, or base64.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import dumps
from triglot.core.tensor import DATATYPES, Array, datatype_of, object_array
from triglot.core.types import InferenceResponse, InputTensor, ParameterValue, TensorSpec
from triglot.model.signature import INSTANCES, Signature, TensorRule
from triglot.model.warm_up_inputs import example_inputs
from triglot.protocols.json.dialect import JsonLimits, type_name
from triglot.protocols.json.text import flatten, read_object

SPLIT, RECORDS, INPUTS, CSV = "dataframe_split", "dataframe_records", "inputs", "csv"
FORMS = (SPLIT, RECORDS, INSTANCES, INPUTS)
CONTENT_TYPE = "content_type"
FRAME, BY_NAME, JSON, ROW = "pd", "dict", "json", "row"
"""What requests and responses hold: columns of a DataFrame, tensors by name, JSON in one element, one object."""
CHAT = frozenset({"messages", "prompt", "input"})
"""Each makes a body the data themselves, as clients of chat models send them; so are the predictions."""
_NULLS = ("", "#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "None", "n/a", "null")
_NANS = ("-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "NaN", "nan")
MISSING = frozenset(_NULLS + _NANS)
"""Cells of CSV that are missing values, as in pandas."""
EXACT = 2**53
"""Integers up to this are numbers of FP64."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed body: the value of one of `FORMS`, columns of text from `CSV`, or a `ROW`; and the `params`."""

    form: str
    value: Any
    params: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """What a body is converted for. `casts`: whether numbers become those of their column as in MLflow."""

    signature: Signature
    columns: Sequence[TensorSpec] = ()
    casts: bool = False

    @property
    def datatypes(self) -> Mapping[str, str]:
        """The datatype of each input and column."""
        return {spec.name: spec.datatype for spec in (*self.signature.inputs, *self.columns)}

    @property
    def only_input(self) -> str:
        """The name of a single tensor."""
        inputs = self.signature.inputs
        return inputs[0].name if len(inputs) == 1 else INPUTS


# --- bodies ---


def parse_json(body: bytes, limits: JsonLimits) -> Invocation:
    """Return the data of a JSON body. Raise `InvalidArgument`."""
    members = read_object(body, limits)
    if not CHAT.isdisjoint(members):
        return Invocation(ROW, members)
    found = [form for form in FORMS if form in members]
    if len(found) != 1:
        got = ", ".join(map(repr, found or list(members)[:10])) or "none"
        raise InvalidArgument(f"expected exactly one of {', '.join(FORMS)}, got {got}")
    params = members.get("params")
    if params is not None and not isinstance(params, dict):
        raise InvalidArgument(f"params: expected an object, got {type_name(params)}")
    return Invocation(found[0], members[found[0]], _parameters(params or {}))


def _parameters(params: Mapping[str, Any]) -> dict[str, ParameterValue]:
    """Return `params` as parameters of a request: lists and objects as their JSON."""
    return {
        name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for name, value in params.items()
        if value is not None
    }


def parse_csv(body: bytes) -> Invocation:
    """Return the columns of a CSV body, whose first row has their names. Raise `InvalidArgument`."""
    try:
        rows = [row for row in csv.reader(io.StringIO(body.decode(), newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(f"expected CSV in UTF-8: {error}") from None
    if not rows:
        raise InvalidArgument("expected CSV with the names of the columns in the first row, got none")
    names, *cells = rows
    wrong = next((at for at, row in enumerate(cells, 1) if len(row) != len(names)), None)
    if wrong is not None:
        raise InvalidArgument(f"row {wrong}: expected {len(names)} cells, got {len(cells[wrong - 1])}")
    return Invocation(CSV, {name: [row[at] for row in cells] for at, name in enumerate(names)})


# --- inputs ---


def inputs_of(sent: Invocation, target: Target) -> tuple[list[InputTensor], dict[str, ParameterValue]]:
    """Return the inputs and parameters of a request. Raise `InvalidArgument`."""
    kind = ""
    value = sent.value
    if sent.form == ROW:
        names = target.datatypes
        others = {name: item for name, item in value.items() if names and name not in names}
        row = {name: item for name, item in value.items() if name not in others}
        return [_instances([row])], {**_parameters(others), CONTENT_TYPE: ROW}
    if sent.form in (SPLIT, RECORDS, CSV):
        kind, inputs = FRAME, _of_columns(_FRAMES[sent.form](value, target), target)
    elif sent.form == INSTANCES and not isinstance(value, list):
        raise InvalidArgument(f"{INSTANCES}: expected a list, got {type_name(value)}")
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        kind, inputs = BY_NAME, _of_columns(_columns(value), target)
    elif isinstance(value, dict):
        is_row = not any(isinstance(item, list) for item in value.values())
        columns = {name: [item] if is_row else item for name, item in value.items()}
        kind, inputs = BY_NAME, _of_columns(columns, target)
    else:
        inputs = _of_list(value if isinstance(value, list) else [value], target)
    parameters = dict(sent.params)
    if kind:
        parameters[CONTENT_TYPE] = kind
    return inputs, parameters


def _of_split(value: Any, _: Target) -> dict[str, Any]:
    names, rows = (value.get("columns"), value.get("data")) if isinstance(value, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(rows, list):
        raise InvalidArgument(f"{SPLIT}: expected an object with the lists 'columns' and 'data'")
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        raise InvalidArgument(f"{SPLIT}: data: expected lists of {len(names)} values")
    return {str(name): [row[at] for row in rows] for at, name in enumerate(names)}


def _of_records(value: Any, _: Target) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise InvalidArgument(f"{RECORDS}: expected a list of objects")
    return _columns(value)


def _of_csv(value: Any, target: Target) -> dict[str, Any]:
    return {name: _cells(cells, target.datatypes.get(name, "")) for name, cells in value.items()}


_FRAMES: Mapping[str, Callable[[Any, Target], dict[str, Any]]] = {
    SPLIT: _of_split,
    RECORDS: _of_records,
    CSV: _of_csv,
}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as columns; a value that a row does not have is null."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}


def _cells(cells: Sequence[str], datatype: str) -> list[Any]:
    """Return the values of a column of text: text if that is declared, else what all of them can be read as."""
    values = [None if cell in MISSING else cell for cell in cells]
    if datatype == "BYTES":
        return values
    for read in (_integer, float, _truth):
        try:
            return [None if value is None else read(value) for value in values]
        except ValueError:
            pass
    return values


def _integer(text: str) -> int:
    if not text.strip().lstrip("+-").isdecimal() or len(text) > 20:
        raise ValueError(text)
    return int(text)


def _truth(text: str) -> bool:
    if text not in ("True", "False", "TRUE", "FALSE", "true", "false"):
        raise ValueError(text)
    return text[0] in "Tt"


def _of_columns(columns: Mapping[str, Any], target: Target) -> list[InputTensor]:
    arrays = {name: _numbers(name, values, target) for name, values in columns.items()}
    if target.columns:  # A column of lists is JSON.
        arrays = {name: None if array is None or array.ndim > 1 else array for name, array in arrays.items()}
    signature = target.signature
    if not signature.any_inputs and not signature.any_tensors:
        given = {name: columns[name] if array is None else array for name, array in arrays.items()}
        return _declared(given, signature)
    tensors = [_tensor(name, array) for name, array in arrays.items() if array is not None]
    if len(tensors) == len(columns):
        return tensors
    if not target.columns and all(array is not None or _is_text(columns[name]) for name, array in arrays.items()):
        return [_tensor(name, _texts(columns[name]) if array is None else array) for name, array in arrays.items()]
    lengths = {len(values) if isinstance(values, list) else -1 for values in columns.values()}
    if len(lengths) != 1 or -1 in lengths:
        raise InvalidArgument("expected columns, lists of equal length, got others")
    return [_instances([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])]


def _of_list(values: list[Any], target: Target) -> list[InputTensor]:
    name = target.only_input
    array = _numbers(name, values, target)
    if not target.signature.any_inputs and not target.signature.any_tensors:
        return example_inputs({name: values if array is None else array}, target.signature)
    return [_instances(values) if array is None else _tensor(name, array)]


def _declared(columns: Mapping[str, Any], signature: Signature) -> list[InputTensor]:
    """Return columns as the inputs that a model declares: of their names, or one matrix."""
    rules = signature.input_rules
    if len(rules) == 1 and not rules.keys() & columns.keys():
        try:
            return example_inputs({next(iter(rules)): np.stack(list(columns.values()), axis=-1)}, signature)
        except ValueError:
            raise InvalidArgument("expected columns of equal length, got others") from None
    return example_inputs({name: _as_column(value, rules.get(name)) for name, value in columns.items()}, signature)


def _as_column(values: Any, rule: TensorRule | None) -> Any:
    """Return a column with a second dim of 1, if that is how it is declared."""
    is_column = rule is not None and rule.spec.shape is not None and rule.spec.shape[1:] == (1,)
    return np.asarray(values)[:, np.newaxis] if is_column and np.ndim(values) == 1 else values


def _tensor(name: str, array: Array) -> InputTensor:
    return InputTensor(name, datatype_of(array), array.shape, array.reshape(-1))


def _instances(rows: Sequence[Any]) -> InputTensor:
    return _tensor(INSTANCES, object_array([json.dumps(row).encode() for row in rows], (len(rows),)))


def _is_text(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in flatten(values))


def _texts(values: Any) -> Array:
    array = np.array(values, object)
    return object_array([str(value).encode() for value in array.ravel().tolist()], array.shape)


def _numbers(name: str, values: Any, target: Target) -> Array | None:
    """Return numbers or booleans of one kind as an array, null as NaN; None for anything else."""
    datatype = target.datatypes.get(name, "BYTES")
    if target.casts and datatype != "BYTES":
        return _cast(name, values, datatype)
    if not isinstance(values, list):
        return None
    flat = flatten(values)
    types = set(map(type, flat))
    if types in ({bool}, {int}, {float}):
        pass
    elif (
        types
        and types <= {int, float, type(None)}
        and float(EXACT) >= max((abs(value) for value in flat if type(value) is int), default=0)
    ):
        values = [float("nan") if value is None else value for value in values]
    else:
        return None
    try:
        array = np.array(values, np.float64 if len(types) > 1 else None)
    except (TypeError, ValueError, OverflowError):  # Lists of several lengths, or nulls in lists.
        return None
    return array if array.dtype.kind in "biuf" else None


def _cast(name: str, values: Any, datatype: str) -> Array:
    """Return numbers of a datatype as MLflow casts to them: fractions are cut, and integers wrap around."""
    dtype = DATATYPES[datatype].dtype
    wide = {"i": np.int64, "u": np.uint64, "f": np.float64}.get(dtype.kind, dtype)
    try:
        with np.errstate(all="ignore"):
            array: Array = np.array(values, object).astype(wide).astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"'{name}': expected values that can be cast to {datatype}: {error}") from None
    return array


# --- predictions ---


def encode_predictions(response: InferenceResponse, form: str) -> bytes:
    """Return the body with the outputs as they were returned: an array, rows of a DataFrame, arrays by name."""
    kind = response.parameters.get(CONTENT_TYPE)
    outputs = {output.name: output.array for output in response.outputs}
    if kind == JSON and len(outputs) == 1:
        (array,) = outputs.values()
        text: bytes = array.item()
        return text if form == ROW else b'{"predictions": %b}' % text
    values = {name: _values(array) for name, array in outputs.items()}
    predictions: Any = values
    if kind == FRAME:
        predictions = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    elif kind != BY_NAME and len(values) == 1:
        (predictions,) = values.values()
    answer = predictions if form == ROW else {"predictions": predictions}
    text = dumps(answer)
    # It writes null for NaN and infinities, which have tokens of their own here.
    return json.dumps(answer).encode() if b"null" in text else text


def _values(array: Array) -> Any:
    if array.dtype.kind not in "OSUT":
        return array.tolist()
    texts = np.empty(array.size, object)
    texts[:] = [_text(value) for value in array.ravel().tolist()]
    return texts.reshape(array.shape).tolist()


def _text(value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.encodebytes(value).decode()
