"""Warms versions up: runs configured requests and examples before a version takes calls (spec 5.6).

The requests run one after the other, each on all instances concurrently. The tensors of a request are made, and
checked like a client's, just before it runs, so that only one request's tensors are in memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triglot.core.call import Call, Reach, no_models
from triglot.core.errors import (
    Code,
    Internal,
    InvalidArgument,
    ModelLoadError,
    ServingError,
    is_serving_error,
    text_of,
)
from triglot.core.types import InferenceRequest, InputTensor
from triglot.executors.hosted import HostedModel
from triglot.executors.work import Function, Inputs, is_cancellation
from triglot.model.config import WarmUpRequest
from triglot.model.validation import bind_inputs, bind_outputs, bind_undeclared
from triglot.model.warm_up_inputs import configured_inputs, example_inputs
from triglot.repository.manager.thread import in_thread
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

WARM_UP_FILE = Path("assets.extra") / "tf_serving_warmup_requests"
"""TensorFlow Serving's warm-up file, in the folder of a version: recorded requests (tfs 6.6)."""
LARGEST_EXAMPLE = 1024
"""Most elements of a configured request that becomes the model's example."""
MAX_RESPONSES = 1000
"""Limit on the responses of a decoupled run, since a stream need not end by itself."""


async def warm_up(servable: Servable, requests: Sequence[WarmUpRequest] = (), reach: Reach = no_models) -> None:
    """Run the configured requests, then the model's `example`, on every instance of `servable`.

    `async def` code runs once, on the loop. A decoupled run ends after `MAX_RESPONSES` responses. The runs have no
    deadline and are not counted in any statistics. `reach` lets them call other models. A small request is the
    example of a model that has none.

    Raise `ModelLoadError` for the first request that does not fit the model's default signature, and for
    exceptions and invalid responses of the model; calls that still run then are cancelled.
    """
    runner, samples = _Runner(servable, reach), _samples(servable, requests)
    with servable:
        for sample in samples:
            try:
                await runner.run(sample)
            except ServingError as error:
                raise ModelLoadError(f"{servable}: {sample.name}: {error.message}", error.code) from error
    again = partial(runner.run_again, samples)
    if isinstance(servable.model, HostedModel):
        servable.model.warm_up = again
    else:
        servable.preparations.append(again)


# --- samples ---


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request that runs `count` times; `tensors` returns its inputs."""

    name: str
    tensors: Callable[[], list[InputTensor]]
    count: int = 1

    def bind(self, servable: Servable) -> Inputs:
        """Return the inputs, checked like a client's. Blocks. Raise `InvalidArgument`."""
        sequences = servable.sequences
        own = () if sequences is None else sequences.own_names
        try:
            tensors = self.tensors()
            of_clients = [tensor for tensor in tensors if tensor.name not in own]
            arrays = bind_inputs(servable.signature, InferenceRequest(servable.name, inputs=of_clients))
            for tensor in tensors:
                if tensor.name in own:  # In Triton a warm-up has to set sequence controls and states.
                    arrays[tensor.name] = bind_undeclared(tensor, servable.name)
            return arrays if sequences is None else sequences.completed(arrays)
        except (MemoryError, ValueError) as error:
            raise InvalidArgument(f"cannot create the inputs: {type(error).__name__}: {error}") from error


def _samples(servable: Servable, requests: Sequence[WarmUpRequest]) -> list[_Sample]:
    model, signature = servable.model, servable.signature
    samples = [
        _Sample(
            f"model_warmup '{request.name}'",
            partial(configured_inputs, request, servable.name, signature, model.max_batch_size),
            max(1, request.count),
        )
        for request in requests
    ]
    example: Any = model.example
    if isinstance(example, Mapping):
        return [*samples, _Sample("example", partial(example_inputs, example, signature))]
    if not isinstance(example, Sequence) or isinstance(example, str | bytes):
        raise _not_inputs(servable, "example", example)
    for number, inputs in enumerate(example):
        if not isinstance(inputs, Mapping):
            raise _not_inputs(servable, f"example[{number}]", inputs)
        samples.append(_Sample(f"example[{number}]", partial(example_inputs, inputs, signature)))
    return samples


def _not_inputs(servable: Servable, name: str, value: object) -> ModelLoadError:
    other = " or a list of such dicts" if name == "example" else ""
    text = f"expected a dict of inputs by name{other}, got {type(value).__name__}"
    return ModelLoadError(f"{servable}: {name}: {text}", Code.INVALID_ARGUMENT)


# --- execution ---


class _Runner:
    """Runs warm-up requests on every instance of a servable."""

    def __init__(self, servable: Servable, reach: Reach) -> None:
        self._servable = servable
        self._reach = reach
        self._logged = threading.Lock()

    async def run(self, sample: _Sample) -> None:
        """Run a sample on every instance. Raise `ServingError`."""
        name = f"making the inputs of {sample.name} of {self._servable}"
        inputs = await in_thread(partial(sample.bind, self._servable), name=name)
        model = self._servable.model
        if not model.example and sum(array.size for array in inputs.values()) <= LARGEST_EXAMPLE:
            model.example = inputs  # What clients are shown.
        for _ in range(sample.count):
            if isinstance(self._servable.model, HostedModel):
                await self._on_processes(self._servable.model.functions(), inputs)
            elif self._servable.on_loop:
                await self._on_loop(inputs)
            else:
                await self._servable.on_every_instance(inputs, self._on_instance, self._to_serving_error)

    def run_again(self, samples: Sequence[_Sample], function: Function) -> None:
        """Run all samples on one instance that is started later, by `function`. Callable on any thread."""
        for sample in samples:
            inputs = sample.bind(self._servable)
            for _ in range(sample.count):
                self._on_instance(function, inputs, Call())

    def _on_instance(self, function: Function, inputs: Inputs, call: Call) -> None:
        """Run one request; on a thread."""
        self._set_up(call)
        responses = _Responses(self._servable)
        call.outlet = responses
        result = function(inputs, call)
        if responses.error is not None:
            raise responses.error
        if isinstance(result, Generator):
            with closing(result):
                for response in result:
                    if not responses.take(response) or call.cancelled:
                        break
        elif result is not None or not responses.taken:
            responses.take(result)

    def _set_up(self, call: Call) -> None:
        call.signature_name = self._servable.default_signature
        call.reach = self._reach

    async def _on_processes(self, functions: Sequence[Function], inputs: Inputs) -> None:
        """Run a request with each of the functions, which block, at the same time."""
        calls = [Call() for _ in functions]
        name = f"the warm-up of {self._servable}"
        runs = [
            in_thread(partial(self._on_instance, function, inputs, call), name=name)
            for function, call in zip(functions, calls, strict=True)
        ]
        try:
            await asyncio.gather(*runs)
        except Exception as error:
            raise self._to_serving_error(error) from None
        finally:
            for call in calls:
                call.cancel()

    async def _on_loop(self, inputs: Inputs) -> None:
        """Run a request on the server's loop."""
        call = Call()
        self._set_up(call)
        responses = _Responses(self._servable)
        try:
            if self._servable.decoupled:
                async with aclosing(self._servable.function(inputs, call)) as results:
                    async for result in results:
                        if not responses.take(result):
                            break
            else:
                responses.take(await self._servable.function(inputs, call))
        except BaseException as error:
            call.cancel()
            if is_cancellation(error):
                raise
            raise self._to_serving_error(error) from None

    def _to_serving_error(self, error: BaseException) -> ServingError:
        """Wrap an exception with the model's own text, as the error is for the server's operator."""
        if is_serving_error(error):
            return error
        if self._logged.acquire(blocking=False):  # Logged once: instances tend to fail alike.
            log.error("%s failed during warm-up", self._servable, exc_info=error)
        return Internal(f"{type(error).__name__}: {text_of(error)}")


class _Responses:
    """Counts the responses of a run and checks each against the signature. An `Outlet`."""

    def __init__(self, servable: Servable) -> None:
        self._servable = servable
        self.taken = 0
        self.error: Exception | None = None

    def take(self, response: object) -> bool:
        """Check a response and return whether more are accepted. Raise `Internal`."""
        servable = self._servable
        lenient = servable.any_output_shapes
        bind_outputs(servable.signature, response, (), servable.name, lenient_shapes=lenient)
        self.taken += 1
        return self.taken < MAX_RESPONSES

    def respond(self, response: object) -> bool:
        """As `take`, but keeps the error: it must not be raised in the model's code."""
        if self.error is None:
            try:
                return self.take(response)
            except Exception as error:
                self.error = error
        return False

    def finish(self) -> None:
        """Do nothing: all responses have been checked."""
