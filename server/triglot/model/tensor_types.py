"""Tensor types, such as `Float32[-1, 16]`: annotations of `infer` that declare a model's inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass
from types import EllipsisType
from typing import Annotated, Any, Final, get_args, get_origin, is_typeddict
from typing import get_type_hints as evaluated  # noqa: TID251 - Only here, annotations mean something.

import numpy as np
from numpy.typing import NDArray

from triglot.core.tensor import DATATYPES, datatype_name
from triglot.core.types import TensorSpec
from triglot.model.model import Model, is_async, is_decoupled, signature_of

OUTPUT: Final = "output"
"""Name of the output of an `infer` that returns one array."""
EXAMPLE: Final = "such as triglot.Float32[-1, 16]"
_ANNOTATED: Final[Any] = Annotated
_ARRAY: Final[Any] = NDArray
_ITERATORS: Final = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype to which dims are added: `Float32[-1, 16]` is `Annotated[NDArray[np.float32], (-1, 16)]`.

    -1 stands for any size, `Float32[...]` is of any rank, and `Float32[()]` a single number.
    """

    dtype: Any

    def __getitem__(self, dims: int | tuple[int, ...] | EllipsisType) -> Any:
        shape = None if dims is ... else dims if isinstance(dims, tuple) else (dims,)
        return _ANNOTATED[_ARRAY[self.dtype], shape]


Bool: Final = TensorType(np.bool_)
UInt8: Final = TensorType(np.uint8)
UInt16: Final = TensorType(np.uint16)
UInt32: Final = TensorType(np.uint32)
UInt64: Final = TensorType(np.uint64)
Int8: Final = TensorType(np.int8)
Int16: Final = TensorType(np.int16)
Int32: Final = TensorType(np.int32)
Int64: Final = TensorType(np.int64)
Float16: Final = TensorType(np.float16)
Float32: Final = TensorType(np.float32)
Float64: Final = TensorType(np.float64)
BFloat16: Final = TensorType(DATATYPES["BF16"].dtype.type)
Bytes: Final = TensorType(np.object_)
"""Texts and binary data: an array of `bytes`, the datatype BYTES."""


def declare(model: Model) -> None:
    """Set the inputs and outputs of a model that declares none from the tensor types of its `infer`.

    Does nothing without any. Raise `ValueError` if some are missing or wrong.
    """
    if model.inputs or model.outputs or model.signatures or model.any_tensors or model.takes_messages:
        return
    try:
        hints = evaluated(model.infer, include_extras=True)
    except Exception:
        return  # Names for type checkers only, or annotations that are no types: none of ours.
    parameters = {name: each for name, each in signature_of(model.infer).parameters.items() if name != "call"}
    specs = {name: _spec(name, hints[name]) for name in parameters if name in hints}
    if not any(specs.values()):
        return
    inputs = []
    for name, parameter in parameters.items():
        spec = specs.get(name)
        if spec is None:
            raise ValueError(f"infer: {name}: expected a tensor type, {EXAMPLE}, got {_text(hints.get(name))}")
        optional = parameter.default is not inspect.Parameter.empty
        inputs.append(TensorSpec(name, spec.datatype, spec.shape, optional))
    # Also works for a frozen dataclass.
    vars(model).update(inputs=inputs, outputs=_outputs(hints.get("return")), takes_arguments=True)


def _text(hint: Any) -> str:
    return "no annotation" if hint is None else repr(hint)


def _spec(name: str, hint: Any) -> TensorSpec | None:
    """Return what a tensor type declares; None for any other annotation. Raise as `TensorSpec`."""
    shape: Any = None
    if get_origin(hint) is Annotated:
        hint, shape, *_ = get_args(hint)
    if get_origin(hint) is np.ndarray:
        (scalar,) = get_args(get_args(hint)[1]) or (None,)
    else:
        scalar, shape = hint, ()
    if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
        return None
    try:
        return TensorSpec(name, datatype_name(np.dtype(scalar)), shape)
    except TypeError as error:
        raise ValueError(f"infer: {name}: {error}") from None


def _outputs(hint: Any) -> list[TensorSpec]:
    """Return what the annotation of `infer`'s result declares. Raise `ValueError`."""
    if get_origin(hint) in _ITERATORS:
        hint = get_args(hint)[0]
    output = _spec(OUTPUT, hint)
    if output is not None:
        return [output]
    if is_typeddict(hint) or hasattr(hint, "_fields"):
        fields = evaluated(hint, include_extras=True)
        specs = {name: _spec(name, field) for name, field in fields.items()}
        wrong = [f"{name}: {_text(fields[name])}" for name, spec in specs.items() if spec is None]
        if wrong:
            raise ValueError(f"infer: expected a tensor type for each output, {EXAMPLE}, got {', '.join(wrong)}")
        return [spec for spec in specs.values() if spec is not None]
    raise ValueError(
        f"infer: expected to return a tensor type, {EXAMPLE}, or a TypedDict or NamedTuple of tensor types, got "
        f"{_text(hint)}"
    )


def by_arguments(infer: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `infer` with tensor types as one that takes its inputs by name, and the call."""
    takes_call = "call" in signature_of(infer).parameters

    def begin(inputs: Mapping[str, Any], call: Any) -> Any:
        return infer(**inputs, call=call) if takes_call else infer(**inputs)

    if is_decoupled(infer):
        return _each_later(begin) if is_async(infer) else _each(begin)
    if is_async(infer):
        return _later(begin)
    return lambda inputs, call: _named(begin(inputs, call))


def _each(begin: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def answers(inputs: Mapping[str, Any], call: Any) -> Iterator[Any]:
        for answer in begin(inputs, call):
            yield _named(answer)

    return answers


def _later(begin: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(inputs: Mapping[str, Any], call: Any) -> Any:
        return _named(await begin(inputs, call))

    return answer


def _each_later(begin: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncIterator[Any]]:
    async def answers(inputs: Mapping[str, Any], call: Any) -> AsyncIterator[Any]:
        async with aclosing(begin(inputs, call)) as own:
            async for answer in own:
                yield _named(answer)

    return answers


def _named(result: Any) -> Any:
    """Return outputs by name for what `infer` returned: a mapping, a named tuple or one array."""
    if result is None or isinstance(result, Mapping):
        return result
    if hasattr(result, "_asdict"):
        return result._asdict()
    return {OUTPUT: result}
