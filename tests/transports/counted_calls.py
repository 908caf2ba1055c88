"""A server whose calls are counted, and what was counted of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from live import Live, live

import triglot
from process import SECONDS
from triglot.core.tensor import Array
from triglot.telemetry.calls import CallStats
from triglot.testing import GatedModel
from waiting import until

FLOAT = b"\0\0\x80\x3f"
GRPS = "/grps.protos.v1.GrpsService/"
PREDICTION = "/tensorflow.serving.PredictionService/"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
Key = tuple[str, str, str, str, int, str]


class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Mapping[str, Array]) -> Any:
        if inputs["x"].size > 2:
            raise RuntimeError("too many")
        return {"y": inputs["x"]}


class Counts(Echo):
    """A stream of as many answers as the first element says; the test lets each but the first one go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def infer(self, inputs: Mapping[str, Array]) -> Any:
        for number in range(int(inputs["x"][0])):
            yield {"y": inputs["x"] + number}
            assert self.go_on.wait(SECONDS)


class HalfPlusTwo(triglot.Model):
    """Classifies and regresses TensorFlow's examples."""

    signatures = {
        name: triglot.Signature(
            inputs=[triglot.TensorSpec("inputs", "BYTES", [-1])],
            outputs=[triglot.TensorSpec(output, "FP32", [-1, 1])],
            method=method,
        )
        for name, method, output in (
            ("serving_default", "predict", "outputs"),
            ("classify_x_to_y", "classify", "scores"),
            ("regress_x_to_y", "regress", "outputs"),
        )
    }

    def infer(self, inputs: Mapping[str, Array], call: triglot.Call) -> Any:
        output = "scores" if call.signature_name.startswith("classify") else "outputs"
        return {output: np.zeros((inputs["inputs"].size, 1), "f4")}


class Server:
    """The server, its models, and what it counted."""

    def __init__(self, running: Live, waits: GatedModel, counts: Counts) -> None:
        self.live = running
        self.waits = waits
        self.counts = counts
        self.telemetry = running.server.telemetry
        self.url = running.url.removesuffix("/v2")
        self.session = running.session

    async def settled(self) -> dict[Key, CallStats]:
        """What was counted of inference calls, once none is in flight; the model may still be at work."""
        await until(lambda: not self.telemetry.in_flight)
        return {
            (
                endpoint.protocol,
                endpoint.entrypoint,
                endpoint.method,
                kind.model,
                kind.version,
                kind.code.name,
            ): stats
            for endpoint, kind, stats in self.telemetry.calls()
            if endpoint.inference
        }

    async def call_counts(self) -> Counter[Key]:
        """How many calls of each kind."""
        return Counter({key: stats.latency.count for key, stats in (await self.settled()).items()})

    async def post(self, path: str, json: Any = None, **options: Any) -> tuple[int, bytes]:
        """Status and body of the answer."""
        async with self.session.post(self.url + path, json=json, **options) as response:
            return response.status, await response.read()

    async def until_started(self) -> None:
        """Until the model `waits` is at work."""
        await self.waits.until_at("infer")

    async def until_two(self) -> None:
        """Until two calls hold a model."""
        await until(lambda: self.live.leases() >= 2)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Server]:
    waits, counts = GatedModel("infer", inputs=Echo.inputs, outputs=Echo.outputs, max_queue_size=1), Counts()
    models = {"echo": Echo(), "waits": waits, "counts": counts, "half": HalfPlusTwo()}
    async with live(models, protocols="kserve,tfserving,grps", grace=0, **options) as running:
        try:
            yield Server(running, waits, counts)
        finally:
            waits.open_point("infer")
            counts.go_on.set()
