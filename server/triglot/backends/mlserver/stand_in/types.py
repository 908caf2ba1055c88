"""MLServer's types of requests and responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from triglot.backends.mlserver.stand_in.absent import missing


class Datatype(Enum):
    """The datatypes of tensors; objects have their names as texts."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"


def text(value: Any) -> str:
    """Check a text. Raise `ValueError`."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r:.60}")
    return value


def integers(value: Any) -> list[int]:
    """Check a list of integers. Raise `ValueError`."""
    if not isinstance(value, list | tuple) or not all(isinstance(dim, int) for dim in value):
        raise ValueError(f"expected a list of integers, got {value!r:.60}")
    return list(value)


def an_object(value: Any) -> dict[str, Any]:
    """Check an object. Raise `ValueError`."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, got {value!r:.60}")
    return dict(value)


def anything(value: Any) -> Any:
    """Return the value."""
    return value


def a(record: type[Record]) -> Callable[[Any], Any]:
    """Return what checks a value that is an object of the class, or the names and values of one."""

    def check(value: Any) -> Any:
        return value if isinstance(value, record) else record(**an_object(value))

    return check


def each(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what checks a list of such values."""

    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list, got {value!r:.60}")
        return [check(item) for item in value]

    return check_all


class Record:
    """Named values: `fields` has what checks each. A name that is not `required` is None unless given.

    Other names are ignored, as MLServer does, unless `keeps_others`. Raise `ValueError` for what is missing or
    wrong.
    """

    fields: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    required: ClassVar[frozenset[str]] = frozenset()
    keeps_others: ClassVar[bool] = False
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **values: Any) -> None:
        kind = type(self).__name__
        for name, check in self.fields.items():
            value = values.pop(name, None)
            if value is None and name in self.required:
                raise ValueError(f"{kind}.{name}: expected a value, got none")
            try:
                vars(self)[name] = value if value is None else check(value)
            except ValueError as error:
                raise ValueError(f"{kind}.{name}: {error}") from None
        if self.keeps_others:
            vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        check = self.fields.get(name)
        vars(self)[name] = value if check is None or value is None else check(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # Its values change.

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the values that are not None, those of records and lists as they are in JSON."""
        return {
            name: _dumped(value)
            for name, value in vars(self).items()
            if value is not None and not name.startswith("_")
        }

    def model_dump_json(self, **_: Any) -> str:
        """Return `model_dump` as JSON; bytes are text in UTF-8."""
        return json.dumps(self.model_dump(), default=lambda value: value.decode())

    dict = model_dump
    json = model_dump_json

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """Return a record with these values. Raise `ValueError`."""
        return values if isinstance(values, cls) else cls(**an_object(values))

    parse_obj = model_validate


def _dumped(value: Any) -> Any:
    if isinstance(value, Record):
        return value.model_dump()
    if isinstance(value, TensorData):
        return value.root
    return [_dumped(item) for item in value] if isinstance(value, list) else value


class TensorData:
    """The elements of a tensor: `root`, as they were given."""

    def __init__(self, root: Any) -> None:
        self.root: Any = root.root if isinstance(root, TensorData) else root

    def __iter__(self) -> Iterator[Any]:
        return iter(self.root)

    def __getitem__(self, index: Any) -> Any:
        return self.root[index]

    def __len__(self) -> int:
        return len(self.root)

    def __eq__(self, other: object) -> bool:
        return bool(self.root == (other.root if isinstance(other, TensorData) else other))

    __hash__ = None  # type: ignore[assignment]  # Its elements change.

    def __repr__(self) -> str:
        return f"TensorData(root={self.root!r})"


def _datatype(value: Any) -> str:
    return str(Datatype(value).value)


class Parameters(Record):
    """Parameters of a request, a response or a tensor, of any names."""

    fields = {"content_type": text, "headers": an_object}
    keeps_others = True


_TENSOR: Mapping[str, Callable[[Any], Any]] = {
    "name": text,
    "shape": integers,
    "datatype": _datatype,
    "parameters": a(Parameters),
    "data": TensorData,
}


class RequestInput(Record):
    """An input tensor."""

    fields = _TENSOR
    required = frozenset({"name", "shape", "datatype", "data"})


class ResponseOutput(RequestInput):
    """An output tensor."""


class RequestOutput(Record):
    """The name of an output that is asked for."""

    fields = {"name": text, "parameters": a(Parameters)}
    required = frozenset({"name"})


class InferenceRequest(Record):
    """A request."""

    fields = {
        "id": text,
        "parameters": a(Parameters),
        "inputs": each(a(RequestInput)),
        "outputs": each(a(RequestOutput)),
    }
    required = frozenset({"inputs"})


class InferenceResponse(Record):
    """A response."""

    fields = {
        "model_name": text,
        "model_version": text,
        "id": text,
        "parameters": a(Parameters),
        "outputs": each(a(ResponseOutput)),
    }
    required = frozenset({"model_name", "outputs"})


class MetadataTensor(Record):
    """What a model says of one of its tensors."""

    fields = {"name": text, "datatype": _datatype, "shape": integers, "parameters": a(Parameters)}
    required = frozenset({"name", "datatype", "shape"})


class MetadataModelResponse(Record):
    """What a model says of itself."""

    fields = {
        "name": text,
        "versions": each(text),
        "platform": text,
        "inputs": each(a(MetadataTensor)),
        "outputs": each(a(MetadataTensor)),
        "parameters": a(Parameters),
    }
    required = frozenset({"name", "platform"})


def __getattr__(name: str) -> Any:
    missing("mlserver.types", name)
