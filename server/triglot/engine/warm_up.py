"""Warming a version: its configured requests and its examples run before it takes calls (spec 5.6).

Strategy: one request after the other, each on all instances at the same time. Its tensors are made, and checked
as a client's are, when its turn has come, so only one request's tensors are held at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from triglot.core.errors import Code, Internal, InvalidArgument, ModelLoadError, ServingError
from triglot.core.model_config import WarmUpInput, WarmUpRequest
from triglot.core.signature import shape_text
from triglot.core.tensor import (
    DATATYPES,
    Array,
    Buffer,
    BytesFramingError,
    DataType,
    datatype_of,
    element_count,
    is_addressable,
    object_array,
    unpack_bytes,
)
from triglot.core.types import Call, InferenceRequest, InputTensor
from triglot.core.validation import bind_inputs, bind_outputs, check_shapes
from triglot.engine.servable import Servable, is_cancelled
from triglot.engine.work import Function, Inputs

log = logging.getLogger(__name__)

MAX_ANSWERS = 1000
"""Of a run whose answers come one by one: it ends there, since a stream need not have an end of its own."""
RANDOM_BELOW = 128
"""Random whole numbers are smaller: they are often an index into something."""
RANDOM_TEXT_LENGTH = 8


async def warm_up(servable: Servable) -> None:
    """Run the requests of the model's configuration, then its `example`, on every instance of `servable`.

    `async def` code runs once, on the loop. A run whose answers come one by one ends with its `MAX_ANSWERS`th.
    These runs have no deadline, are no request's, and so are counted nowhere.

    Raises `ModelLoadError` for the first request that does not fit the model's default signature, and for what
    the model raises or answers wrongly; what still runs then sees that its call is cancelled.
    """
    with servable:
        for sample in _samples(servable):
            try:
                inputs = await asyncio.to_thread(sample.bind, servable)
                run = _Run(servable)
                for _ in range(sample.count):
                    await run(inputs)
            except ServingError as error:
                raise ModelLoadError(f"{servable}: {sample.name}: {error.message}", error.code) from error


# --- what is run ---


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request that runs `count` times; `tensors` makes its inputs."""

    name: str
    tensors: Callable[[], list[InputTensor]]
    count: int = 1

    def bind(self, servable: Servable) -> dict[str, Array]:
        """On a thread: the inputs, checked like those of a client's request. Raises `InvalidArgument`."""
        try:
            return bind_inputs(servable.signature, InferenceRequest(servable.name, inputs=self.tensors()))
        except (MemoryError, ValueError) as error:
            raise InvalidArgument(f"the inputs cannot be made: {type(error).__name__}: {error}") from error


def _samples(servable: Servable) -> list[_Sample]:
    model = servable.model
    configured = [
        _Sample(f"model_warmup '{one.name}'", partial(_configured, servable, one), max(1, one.count))
        for one in model.config.warm_up
    ]
    example = model.example
    if isinstance(example, Mapping):
        return [*configured, _Sample("example", partial(_given, servable, example))]
    if not isinstance(example, Sequence) or isinstance(example, str | bytes):
        raise _not_inputs(servable, "example", example)
    for number, one in enumerate(example):
        if not isinstance(one, Mapping):
            raise _not_inputs(servable, f"example[{number}]", one)
        configured.append(_Sample(f"example[{number}]", partial(_given, servable, one)))
    return configured


def _not_inputs(servable: Servable, name: str, value: object) -> ModelLoadError:
    other = " or a list of such dicts" if name == "example" else ""
    text = f"expected a dict of inputs by name{other}, got {type(value).__name__}"
    return ModelLoadError(f"{servable}: {name}: {text}", Code.INVALID_ARGUMENT)


# --- running it ---


class _Run:
    """Runs one request on every instance."""

    def __init__(self, servable: Servable) -> None:
        self._servable = servable
        self._told = False

    async def __call__(self, inputs: Inputs) -> None:
        """Raises `ServingError`."""
        if self._servable.on_loop:
            await self._on_loop(inputs)
        else:
            await self._servable.on_every_instance(inputs, self._on_instance, self._explain)

    def _on_instance(self, function: Function, inputs: Inputs, call: Call) -> None:
        """On an instance's thread."""
        call.signature_name = self._servable.default_signature
        answers = _Answers(self._servable)
        call.respond = answers.respond
        result = function(inputs, call)
        if answers.error is not None:
            raise answers.error
        if isinstance(result, Generator):
            with closing(result):
                for answer in result:
                    if not answers.take(answer) or call.cancelled:
                        break
        elif result is not None or not answers.taken:
            answers.take(result)

    async def _on_loop(self, inputs: Inputs) -> None:
        call = Call()
        call.signature_name = self._servable.default_signature
        answers = _Answers(self._servable)
        try:
            if self._servable.decoupled:
                async with aclosing(self._servable.function(inputs, call)) as results:
                    async for result in results:
                        if not answers.take(result):
                            break
            else:
                answers.take(await self._servable.function(inputs, call))
        except BaseException as error:
            call.cancel()
            if isinstance(error, GeneratorExit) or is_cancelled(error):
                raise
            raise self._explain(error) from None

    def _explain(self, error: BaseException) -> ServingError:
        """For the server's operator, so with the model's own words."""
        if isinstance(error, ServingError):
            return error
        if not self._told:  # Instances tend to fail alike.
            self._told = True
            log.error("%s failed in its warm-up", self._servable, exc_info=error)
        return Internal(f"{type(error).__name__}: {error}")


class _Answers:
    """What a run answers, each checked against the signature."""

    def __init__(self, servable: Servable) -> None:
        self._servable = servable
        self.taken = 0
        self.error: Exception | None = None

    def take(self, answer: object) -> bool:
        """Whether there may be more. Raises `Internal`."""
        bind_outputs(self._servable.signature, answer, (), self._servable.name)
        self.taken += 1
        return self.taken < MAX_ANSWERS

    def respond(self, answer: object) -> bool:
        """As `take`, for `Call.respond`: the model's code is not to meet the error."""
        if self.error is None:
            try:
                return self.take(answer)
            except Exception as error:
                self.error = error
        return False


# --- a configured request's tensors ---


def _configured(servable: Servable, request: WarmUpRequest) -> list[InputTensor]:
    """Raises `InvalidArgument`, before memory is taken for what does not fit."""
    batch, limit = max(1, request.batch_size), servable.model.max_batch_size
    if batch > (limit or 1):
        raise InvalidArgument(
            f"batch_size: expected at most {limit or 1}, got {batch}: the model's max_batch_size is {limit}"
        )
    rows = (batch,) if limit else ()
    tensors = []
    for name, wanted in request.inputs.items():
        shape = (*rows, *wanted.dims)
        if wanted.datatype not in DATATYPES:
            raise InvalidArgument(
                f"input '{name}': datatype '{wanted.datatype}' is none of {', '.join(DATATYPES)}"
            )
        if any(dim < 0 for dim in shape):
            raise InvalidArgument(
                f"input '{name}': expected dims of 0 and more, got {shape_text(wanted.dims)}: dims that vary need "
                "a size here"
            )
        if not is_addressable(shape, DATATYPES[wanted.datatype].dtype):
            raise InvalidArgument(f"input '{name}' has too many elements: shape {shape_text(shape)}")
        tensors.append(InputTensor(name, wanted.datatype, shape, b""))
    check_shapes(servable.signature, InferenceRequest(servable.name, inputs=tensors))
    random = np.random.default_rng(0)  # The same ones every time: a version that loads does so again.
    for tensor in tensors:
        tensor.data = _data(tensor, request.inputs[tensor.name], batch, random)
    return tensors


def _data(tensor: InputTensor, wanted: WarmUpInput, batch: int, random: np.random.Generator) -> Buffer | Array:
    datatype = DATATYPES[tensor.datatype]
    count = element_count(tensor.shape)
    if wanted.file is not None:
        try:
            return _from_file(wanted.file, datatype, element_count(wanted.dims), batch)
        except OSError as error:
            raise InvalidArgument(f"input '{tensor.name}': {wanted.file}: {error.strerror}") from error
        except InvalidArgument as error:
            raise InvalidArgument(f"input '{tensor.name}': {wanted.file}: {error.message}") from error
    if wanted.random:
        return _random(random, datatype.dtype, count)
    return object_array([b""] * count, (count,)) if datatype.dtype.hasobject else np.zeros(count, datatype.dtype)


def _random(random: np.random.Generator, dtype: np.dtype[Any], count: int) -> Array:
    """`count` values: from 0 to 1, whole numbers below `RANDOM_BELOW`, or printable ASCII."""
    if dtype.hasobject:
        text = random.integers(ord("!"), ord("~") + 1, (count, RANDOM_TEXT_LENGTH), np.uint8).tobytes()
        ends = range(RANDOM_TEXT_LENGTH, len(text) + 1, RANDOM_TEXT_LENGTH)
        return object_array([text[end - RANDOM_TEXT_LENGTH : end] for end in ends], (count,))
    if dtype.kind in "bui":
        return random.integers(0, 2 if dtype.kind == "b" else RANDOM_BELOW, count, np.uint8).astype(dtype)
    values = random.random(count, np.float64 if dtype.itemsize >= 8 else np.float32)
    return values.astype(dtype)


def _from_file(file: Path, datatype: DataType, count: int, batch: int) -> Buffer | Array:
    """The `count` elements of a request without its batch, `batch` times; or those of the whole batch.

    Raises `InvalidArgument` when there are others, and `OSError`.
    """
    with file.open("rb") as stream:
        if datatype.dtype.hasobject:
            elements = _elements(stream.read(), count, batch)
            return object_array(elements, (len(elements),))
        size, wanted = os.fstat(stream.fileno()).st_size, count * datatype.itemsize
        if size not in (wanted, wanted * batch):
            whole = f", or {wanted * batch} for the batch of {batch}" if batch > 1 else ""
            raise InvalidArgument(f"expected {wanted} bytes{whole}, found {size}")
        data = stream.read()
        return data if size == wanted * batch else data * batch


def _elements(data: bytes, count: int, batch: int) -> list[bytes]:
    try:
        return unpack_bytes(data, count) * batch
    except BytesFramingError:
        if batch == 1:
            raise
    return unpack_bytes(data, count * batch)


# --- an example's tensors ---


def _given(servable: Servable, example: Mapping[str, Any]) -> list[InputTensor]:
    """Raises `InvalidArgument` for what is not of the declared datatype, nor can be made so."""
    rules = servable.signature.input_rules
    tensors = []
    for name, value in example.items():
        rule = rules.get(name)
        try:
            array = _array(value, "" if rule is None else rule.spec.datatype)
        except InvalidArgument as error:
            raise InvalidArgument(f"input '{name}': {error.message}") from error
        except Exception as error:  # Its elements can be anything.
            raise InvalidArgument(f"input '{name}': no array can be made of it: {error}") from error
        tensors.append(InputTensor(name, datatype_of(array), array.shape, array))
    return tensors


def _array(value: Any, datatype: str) -> Array:
    """The value as an array of `datatype`, or as what it is when none is declared."""
    # numpy's own text arrays drop zero bytes at the end, so none is made on the way.
    array = value if isinstance(value, np.ndarray) else np.asarray(value, object if datatype == "BYTES" else None)
    found = datatype_of(array)
    if found == "BYTES" and datatype in ("", "BYTES"):
        return _text(array if isinstance(value, np.ndarray) else np.asarray(value, object))
    if not datatype or found == datatype:
        return array.astype(DATATYPES[found].dtype, copy=False)
    if "BYTES" in (found, datatype):
        raise InvalidArgument(f"expected {datatype} values, got {array.dtype}")
    return _converted(array, datatype)


def _text(array: Array) -> Array:
    elements = []
    for element in array.ravel().tolist():
        if not isinstance(element, str | bytes):
            raise InvalidArgument(f"expected text or bytes, got {type(element).__name__}: {element!r}")
        elements.append(element.encode() if isinstance(element, str) else bytes(element))
    return object_array(elements, array.shape)


def _converted(array: Array, datatype: str) -> Array:
    """The numbers as `datatype`; floats are rounded, and nothing else is lost."""
    dtype = DATATYPES[datatype].dtype
    if array.dtype.kind != "c" or dtype.kind == "c":
        with np.errstate(all="ignore"):
            converted = array.astype(dtype)
        whole = dtype.kind in "bui"
        if _are_whole(array, dtype) if whole else (np.isfinite(converted) == np.isfinite(array)).all():
            return converted
    span = f" from {array.min()} to {array.max()}" if array.size else ""
    raise InvalidArgument(f"expected {datatype} values, got {array.dtype}{span}")


def _are_whole(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether the numbers are all whole ones that `dtype` has."""
    if not array.size:
        return True
    if array.dtype.kind not in "bui":
        array = array.astype(np.float64)
        if not (array == np.trunc(array)).all():
            return False
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    # Python compares its own numbers exactly, whatever their types.
    return bool(lowest <= array.min().item() and array.max().item() <= highest)
