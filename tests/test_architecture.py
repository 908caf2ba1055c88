"""docs/architecture.md lists the folders, and the files that a call enters: as it is."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

import triglot
from tests.served_models import serving
from triglot.pb.grps.grps_pb2 import DT_FLOAT32, GenericTensor, GenericTensorData, GrpsMessage
from triglot.pb.kserve import inference_pb2 as pb
from triglot.telemetry import store
from triglot.version import build

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "server" / "triglot"
CALLS = 50
GRPS = "/grps.protos.v1.GrpsService/"


Inputs = dict[str, np.ndarray]


class Identity(triglot.Model):
    """As most models are: a plain `infer`, on a thread."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]

    def infer(self, inputs: Inputs) -> Any:
        return {"y": inputs["x"]}


class Streaming(Identity):
    """The same as a stream of one response."""

    def infer(self, inputs: Inputs) -> Any:
        yield {"y": inputs["x"]}


PAGE = ROOT / "docs" / "architecture.md"
FOLDERS, INFER, STREAM, PREDICT = re.split("<!-- walk .*-->", PAGE.read_text())
"""The page before its walks, and the walks of ModelInfer, PredictStreaming and a REST `:predict`."""


def test_every_folder_is_listed() -> None:
    rows = re.findall(r"^\| (`.+?) \|", FOLDERS, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)/`", row)]
    assert sorted(named) == sorted({file.relative_to(PACKAGE).parts[0] for file in PACKAGE.glob("*/**/*.py")})


def test_the_picture_shows_folders() -> None:
    parts = re.findall(r'class="name".*?>(\w+)', PAGE.with_suffix(".svg").read_text())
    assert set(parts) > {"transports", "dataplane"}
    assert [part for part in parts if part != "client" and not (PACKAGE / part).is_dir()] == []


def listed(walk: str) -> list[str]:
    return sorted(re.findall(r"`(\w+/\S+\.py)`", walk))


class Recorder:
    """Records the files that most calls enter, on all threads."""

    def __init__(self) -> None:
        self._by_this_call: set[str] = set()
        self._notes = threading.Event()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """See `sys.setprofile`."""
        if event == "call" and self._notes.is_set():
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                self._by_this_call.add(file.relative_to(PACKAGE).as_posix())

    async def walk(self, call: Callable[[int], Awaitable[object]]) -> list[str]:
        """Return the files that calls enter."""
        entered: Counter[str] = Counter()
        for number in range(2 * CALLS):
            if number == CALLS:  # By now all that is remembered is there.
                self._notes.set()
                sys.setprofile(self.note)
            await call(number)
            entered.update(self._by_this_call)
            self._by_this_call.clear()
        sys.setprofile(None)
        self._notes.clear()
        # What comes now and then is not part of a call; what ends one may come after it.
        return sorted(file for file, count in entered.items() if count > CALLS // 2)


TRACED = pytest.mark.skipif(build() == "compiled", reason="compiled functions are not traced")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    # Each second's numbers are no part of a call, however slow the machine is.
    monkeypatch.setattr(store, "LAG_SECONDS", 3600.0)
    recorder = Recorder()
    threading.setprofile(recorder.note)
    try:
        yield recorder
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@TRACED
async def test_the_files_that_calls_of_grpc_enter(recorder: Recorder) -> None:
    async with (
        serving({"m": Identity(), "s": Streaming()}, grpc_transport="h2") as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.server.grpc_port}") as channel,
    ):
        model_infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(64)])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 16])

        async def infer(number: int) -> None:
            request.id = str(number)
            await model_infer(request.SerializeToString(), timeout=30)

        assert await recorder.walk(infer) == listed(INFER)

        tensor = GenericTensor(name="x", dtype=DT_FLOAT32, shape=[1, 16], flat_float32=[1.0] * 16)
        data = [
            GrpsMessage(model=model, gtensors=GenericTensorData(tensors=[tensor])).SerializeToString()
            for model in ("m-1", "s-1")
        ]
        predict = channel.unary_unary(GRPS + "Predict")
        streaming = channel.unary_stream(GRPS + "PredictStreaming")

        async def stream(_: int) -> None:
            assert [response async for response in streaming(data[1], timeout=30)]

        unary = await recorder.walk(lambda _: predict(data[0], timeout=30))
        more = set(await recorder.walk(stream)).difference(unary)
        assert sorted(more) == listed(STREAM)


@TRACED
async def test_the_files_that_a_call_of_rest_enters(recorder: Recorder) -> None:
    async with (
        serving({"m": Identity()}) as here,
        aiohttp.ClientSession(f"http://127.0.0.1:{here.server.rest_port}") as session,
    ):

        async def predict(number: int) -> None:
            async with session.post("/v1/models/m:predict", json={"instances": [[number + 0.5] * 16]}) as response:
                assert response.status == 200
                await response.read()

        assert await recorder.walk(predict) == listed(PREDICT)
