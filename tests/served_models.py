"""Models that a test makes, behind a server in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_transport import transport_options
from numpy.typing import NDArray

import triglot
from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.permission import EVERYTHING
from triglot.core.types import InferenceRequest, InputTensor
from triglot.repository.scan.source import ModelFiles
from waiting import until

SECONDS = 20
"""How long anything may take; only a test that fails waits so long."""
Arrays = Mapping[str, NDArray[Any]]
X = [triglot.TensorSpec("x", "INT32", [-1])]
Y = [triglot.TensorSpec("y", "INT32", [-1])]
both = pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
"""For a caller on a thread, and for one on the loop."""


class Function(triglot.Model):
    """Has input `x`, output `y`, and the `infer` that it is given; `said` changes further attributes."""

    inputs, outputs = X, Y

    def __init__(self, infer: Callable[..., Any], **said: Any) -> None:
        self.infer = infer
        vars(self).update(said)


class Gated(triglot.Model):
    """Says that it has begun, and waits for the test."""

    inputs, outputs = X, Y

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.calls: list[Call] = []

    def infer(self, inputs: Arrays, call: Call) -> Any:
        self.calls.append(call)
        self.begun.set()
        assert self.gate.wait(SECONDS)
        return {"y": inputs["x"]}


def twice(inputs: Arrays) -> dict[str, Any]:
    """An `infer`."""
    return {"y": inputs["x"] * 2}


async def twice_on_loop(inputs: Arrays) -> dict[str, Any]:
    """As `twice`."""
    return {"y": inputs["x"] * 2}


def calling(name: str, *, on_loop: bool, **said: Any) -> Function:
    """A model that answers what another one does, called with its own input and `said`."""

    def on_thread(inputs: Arrays, call: Call) -> Any:
        return {"y": call.infer(name, {"x": inputs["x"]}, **said)["y"]}

    async def async_infer(inputs: Arrays, call: Call) -> Any:
        return {"y": (await call.infer(name, {"x": inputs["x"]}, **said))["y"]}

    return Function(async_infer if on_loop else on_thread)


def ensemble(*steps: triglot.Step, **said: Any) -> triglot.Ensemble:
    """Of input `x` and output `y`, unless `said` otherwise."""
    model = triglot.Ensemble()
    vars(model).update({"inputs": X, "outputs": Y, "steps": steps} | said)
    return model


def step(model: str, taken: str, given: str, version: int = 0) -> triglot.Step:
    """Of a model with input `x` and output `y`."""
    return triglot.Step(model, {"x": taken}, {"y": given}, version)


class Served:
    """A running server."""

    def __init__(self, server: triglot.Server) -> None:
        self.server = server

    async def infer(self, model: str, x: NDArray[Any], call: Call | None = None, **said: Any) -> NDArray[Any]:
        """The output `y`, as a protocol gets it. Raises `ServingError`."""
        tensor = InputTensor("x", "INT32", x.shape, x.reshape(-1))
        request = InferenceRequest(model, inputs=[tensor], **said)
        response = await self.server.dataplane.infer(request, call or Call())
        return next(output.array for output in response.outputs if output.name == "y")

    async def error(self, model: str, x: NDArray[Any], call: Call | None = None, **said: Any) -> ServingError:
        """The error that it ends with. Raises `AssertionError` when it does not."""
        try:
            answer = await self.infer(model, x, call, **said)
        except ServingError as error:
            return error
        raise AssertionError(f"no error, but {answer}")

    def leases(self) -> dict[str, int]:
        """The calls that hold each model at the moment."""
        versions = self.server.dataplane.versions(EVERYTHING)
        return {one.files.name: one.servable.leases for one in versions if one.servable is not None}

    async def is_idle(self) -> None:
        """Wait until no call holds a model, or is counted as running."""
        await until(lambda: not any(self.leases().values()))
        await until(lambda: not any(one.in_flight for one in self.server.telemetry.endpoints()))


@asynccontextmanager
async def serving(models: Mapping[str, triglot.Model], **options: Any) -> AsyncIterator[Served]:
    """A server of these models by their names."""
    files = [
        ModelFiles(name, 1, "python", Path(f"{name}.py"), make=partial(_itself, model))
        for name, model in models.items()
    ]
    config = triglot.Config(**{"grpc_port": 0, "rest_port": 0, "grace": 1.0} | transport_options(**options))
    async with triglot.Server(config=config, models=files) as server:
        yield Served(server)


def _itself(model: triglot.Model) -> triglot.Model:
    return model


def ints(*values: int) -> NDArray[np.int32]:
    """An array."""
    return np.array(values, np.int32)
