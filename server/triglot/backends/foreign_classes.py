"""Model classes written for other Python servers: finds them in a file, and runs their code.

That code is `async def` but may block, as those servers tolerate. So each model has an event loop on a thread of
its own: many of its calls can wait there concurrently, and none blocks the server.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import numpy as np

from triglot import parts
from triglot.core.call import Call
from triglot.core.errors import Internal, InvalidArgument, MissingDependency, NotFound, ServingError
from triglot.core.tensor import DATATYPES, Array, bytes_elements, object_array
from triglot.core.types import ParameterValue
from triglot.model.config import ModelConfig
from triglot.model.model import Model

T = TypeVar("T")

Inputs = Mapping[str, Array]
CLASSES = MappingProxyType(
    {
        "mlserver": ("MLModel", "mlserver"),
        "kserve": ("Model", "kserve_model"),
    }
)
"""By package: the base class, and the backend whose `model_of` makes a model of a class."""


def mentions(source: bytes) -> bool:
    """Whether a file may contain such a class."""
    return any(package.encode() in source for package in CLASSES)


def provide(source: bytes) -> None:
    """Make packages importable that a file may need and that are not installed, where we have a stand-in."""
    if b"mlserver" in source:
        with suppress(parts.MissingPart):
            parts.load_module("backend", "mlserver").provide()


def model_of(module: ModuleType, file: Path, config: ModelConfig) -> Model | None:
    """Return the loaded model of the class that the module defines, or None without one.

    Raise `ModelLoadError` for an unsupported class, and the exceptions of the class's own code.
    """
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for base in value.__mro__[1:]:
                name, backend = CLASSES.get(base.__module__.partition(".")[0], ("", ""))
                if base.__name__ == name:
                    model: Model = _adapter(backend, file).model_of(value, file, config)
                    return model
    return None


def _adapter(backend: str, file: Path) -> Any:
    try:
        return parts.load_module("backend", backend)
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: {error}") from error


class CodeLoop:
    """An event loop on its own daemon thread; owned by one model."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._closed:
                # asyncio stores these in the task and raises them out of the loop, too.
                with suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedules the coroutine. Callable on any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result. Blocks; not callable on the loop's own thread."""
        return self.submit(work).result()

    def close(self) -> None:
        """Stop the loop and join its thread."""
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class ForeignModel(Model):
    """A model whose code runs on a `CodeLoop` and returns one response per request."""

    any_tensors = True

    def __init__(self, loop: CodeLoop) -> None:
        self._loop = loop

    async def infer(self, inputs: Inputs, call: Call) -> Any:
        """Return the response; raise `InvalidArgument` and `NotFound` for errors that are the client's."""
        return await asyncio.wrap_future(self._loop.submit(self._infer(inputs, call)))

    async def _infer(self, inputs: Inputs, call: Call) -> Any:
        try:
            return await self.answer(inputs, call)
        except Exception as error:
            raise map_error(error) from error

    @abstractmethod
    async def answer(self, inputs: Inputs, call: Call) -> Any:
        """Return the response of the model's code. Called on the model's own loop."""


class ForeignStream(ForeignModel):
    """A model that yields responses; it resumes once the previous one was taken."""

    async def infer(  # type: ignore[override]  # A model's `infer` is any of the four kinds of functions.
        self, inputs: Inputs, call: Call
    ) -> AsyncGenerator[Any, None]:
        """Yield the responses; raise as `ForeignModel.infer` does."""
        answers = self.answers(inputs, call)
        try:
            while (answer := await asyncio.wrap_future(self._loop.submit(_next(answers)))) is not None:
                yield answer
        finally:
            await asyncio.wrap_future(self._loop.submit(_close_stream(answers)))

    @abstractmethod
    def answers(self, inputs: Inputs, call: Call) -> AsyncIterator[Any]:
        """Yield the responses of the model's code. Called on the model's own loop."""


async def _next(answers: AsyncIterator[Any]) -> Any:
    try:
        return await anext(answers, None)
    except Exception as error:
        raise map_error(error) from error


async def _close_stream(answers: Any) -> None:
    if hasattr(answers, "aclose"):
        await answers.aclose()


def map_error(error: Exception) -> Exception:
    """Return the error for the client: with its text if the client caused it, otherwise unchanged."""
    status = getattr(error, "status_code", None)
    text = str(getattr(error, "detail", None) or error)
    name = type(error).__name__
    if isinstance(error, ServingError):
        return error
    if status == 404 or name == "ModelNotFound":
        return NotFound(text)
    if (isinstance(status, int) and 400 <= status < 500) or name == "InvalidInput":
        return InvalidArgument(text)
    return error


def array_of(name: str, datatype: str, shape: Any, data: Any) -> Array:
    """Return the elements of an output, nested lists or flat, as an array. Raise `Internal` with its name."""
    try:
        if datatype == "BYTES":
            texts = np.array([data] if isinstance(data, str | bytes) else data, object).reshape(-1)
            elements = bytes_elements(texts)
            # MLServer's users give the bytes or characters of one text as its shape.
            counts_text = len(elements) == 1 and tuple(shape) in {
                (len(elements[0]),),
                (len(elements[0].decode()),),
            }
            return object_array(elements, (1,) if counts_text else tuple(shape))
        return np.asarray(data, DATATYPES[datatype].dtype).reshape(tuple(shape))
    except (KeyError, TypeError, ValueError) as error:
        raise Internal(f"output '{name}': expected {datatype} elements of shape {list(shape)}: {error}") from None


def plain(parameters: Mapping[str, Any]) -> dict[str, ParameterValue]:
    """Return those of the parameters that a response can carry."""
    return {name: value for name, value in parameters.items() if isinstance(value, bool | int | float | str)}
