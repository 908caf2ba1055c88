"""Serves models that a test defines, in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import triglot
from tests.waiting import until
from triglot import testing
from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.operation import EVERYTHING
from triglot.core.types import InferenceRequest, InputTensor
from triglot.testing import GatedModel

SECONDS = 20
"""Deadline of every wait; only a failing test waits as long."""
Arrays = Mapping[str, NDArray[Any]]
X = [triglot.TensorSpec("x", "INT32", [-1])]
Y = [triglot.TensorSpec("y", "INT32", [-1])]
both = pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
"""Runs a test twice: with a calling model on a thread, and with one on the event loop."""


class Function(triglot.Model):
    """A model with input `x`, output `y` and the given `infer`; `attributes` are set on it too."""

    inputs, outputs = X, Y

    def __init__(self, infer: Callable[..., Any], **attributes: Any) -> None:
        self.infer = infer
        vars(self).update(attributes)


class Gated(GatedModel):
    """A model that waits in `infer`, and keeps its calls."""

    inputs, outputs = X, Y

    def __init__(self) -> None:
        super().__init__("infer")
        self.calls: list[Call] = []

    def infer(self, inputs: Arrays, call: Call) -> Any:
        self.calls.append(call)
        return super().infer(inputs)


def twice(inputs: Arrays) -> dict[str, Any]:
    """An `infer` that doubles `x`."""
    return {"y": inputs["x"] * 2}


async def twice_on_loop(inputs: Arrays) -> dict[str, Any]:
    """As `twice`, on the event loop."""
    return {"y": inputs["x"] * 2}


def calling(name: str, *, on_loop: bool, **fields: Any) -> Function:
    """Return a model that calls another one with its own input and `fields`, and returns the result.

    `on_loop`: whether its `infer` is a coroutine function.
    """

    def on_thread(inputs: Arrays, call: Call) -> Any:
        return {"y": call.infer(name, {"x": inputs["x"]}, **fields)["y"]}

    async def async_infer(inputs: Arrays, call: Call) -> Any:
        return {"y": (await call.infer(name, {"x": inputs["x"]}, **fields))["y"]}

    return Function(async_infer if on_loop else on_thread)


def ensemble(*steps: triglot.Step, **attributes: Any) -> triglot.Ensemble:
    """Return an ensemble with input `x` and output `y`, unless `attributes` has others."""
    model = triglot.Ensemble()
    vars(model).update({"inputs": X, "outputs": Y, "steps": steps} | attributes)
    return model


def step(model: str, taken: str, given: str, version: int = 0) -> triglot.Step:
    """Return the step of a model with input `x` and output `y`: it reads tensor `taken` and writes `given`."""
    return triglot.Step(model, {"x": taken}, {"y": given}, version)


class Served:
    """A running server, with calls to its data plane."""

    def __init__(self, server: triglot.Server) -> None:
        self.server = server

    async def infer(self, model: str, x: NDArray[Any], call: Call | None = None, **fields: Any) -> NDArray[Any]:
        """Call a model as a protocol does; returns its output `y`. Raise `ServingError`."""
        tensor = InputTensor("x", "INT32", x.shape, x.reshape(-1))
        request = InferenceRequest(model, inputs=[tensor], **fields)
        response = await self.server.dataplane.infer(request, call or Call())
        return next(output.array for output in response.outputs if output.name == "y")

    async def error(self, model: str, x: NDArray[Any], call: Call | None = None, **fields: Any) -> ServingError:
        """Call a model and return the error. Raise `AssertionError` when the call succeeds."""
        try:
            answer = await self.infer(model, x, call, **fields)
        except ServingError as error:
            return error
        raise AssertionError(f"no error, but {answer}")

    def leases(self) -> dict[str, int]:
        """Return the number of calls that hold each model now, by its name."""
        versions = self.server.dataplane.versions(EVERYTHING)
        return {
            version.files.name: version.servable.leases for version in versions if version.servable is not None
        }

    async def is_idle(self) -> None:
        """Wait until no call holds a model, and none is counted as in flight."""
        await until(lambda: not any(self.leases().values()))
        await until(lambda: not any(endpoint.in_flight for endpoint in self.server.telemetry.endpoints()))


@asynccontextmanager
async def serving(models: Mapping[str, triglot.Model], **options: Any) -> AsyncIterator[Served]:
    """Run a server with these models, given by name; `options` are those of `triglot serve`."""
    async with testing.serve(models, **options) as running:
        yield Served(running.server)


def ints(*values: int) -> NDArray[np.int32]:
    """Return an array of shape [values]."""
    return np.array(values, np.int32)
