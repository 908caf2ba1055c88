"""KServe's models, as its users write them, through a server's ports."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from tests.backends.triton_served import GrpcClient, serving, text

pytest.importorskip("kserve", reason="the kserve environment has it")

V2 = '''
import argparse
import asyncio
from typing import Dict, Union

import numpy as np
from helper import TIMES
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, logging, model_server
from kserve.errors import InvalidInput


class Mine(Model):
    """Multiplies x."""

    def __init__(self, name: str):
        super().__init__(name)
        self.loaded = False
        self.waiting, self.enough = 0, asyncio.Event()
        self.load()

    def load(self):
        self.loaded = True
        self.ready = True

    async def preprocess(self, payload: InferRequest, headers: Dict[str, str] = None) -> InferRequest:
        x = payload.inputs[0].as_numpy()
        if x.ravel()[0] < 0:
            raise InvalidInput("x is below zero")
        if x.ravel()[0] == 13:
            raise KeyError("thirteen")
        if x.ravel()[0] == 7:
            self.waiting += 1
            if self.waiting == 3:
                self.enough.set()
            await self.enough.wait()
        return payload

    def predict(self, payload: InferRequest, headers: Dict[str, str] = None) -> InferResponse:
        y = InferOutput(name="y", shape=[], datatype="FP32")
        x = payload.inputs[0].as_numpy() * TIMES
        y = InferOutput(name="y", shape=list(x.shape), datatype="FP32")
        y.set_data_from_numpy(x, binary_data=bool(payload.parameters.get("binary")))
        said = f"{payload.id} {payload.model_name} {headers.get('from')} {payload.parameters.get('mine')}"
        said += f" {payload.inputs[0].parameters.get('tag')}"
        if len(payload.inputs) > 1:
            said += payload.inputs[1].as_numpy()[0].decode()
        names = InferOutput(name="said", shape=[1], datatype="BYTES", data=[said])
        outputs = [y, names, names] if payload.parameters.get("twice") else [y, names]
        return InferResponse(payload.id, self.name, outputs, parameters={"took": 0.5})


if __name__ == "__main__":
    ModelServer().start([Mine("mine")])
'''
V1 = """
from typing import Dict
import numpy as np
from kserve import Model

class Mine(Model):
    def __init__(self, name: str):
        super().__init__(name)

    def load(self) -> bool:
        self.ready = True
        return True

    def predict(self, payload: Dict, headers: Dict[str, str] = None) -> Dict:
        if payload["instances"] == [[]]:
            return {"other": 1}
        return {"predictions": np.array(payload["instances"], float) * 2}
"""


def write(folder: Path, source: str = V2) -> Path:
    version = folder / "mine" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (version / "helper.py").write_text("TIMES = 2\n")
    return folder / "mine"


X = np.array([[1.0, 2.0]], np.float32)


async def test_two_outputs_of_one_name_are_an_error(tmp_path: Path) -> None:
    async with serving(write(tmp_path)) as client:
        code, details = await client.failure("mine", {"x": X}, parameters={"twice": True})
        assert code is grpc.StatusCode.INTERNAL
        assert "output 'said': expected one tensor in the model's response, got 2" in details
        assert (await client.infer("mine", {"x": X})).outputs["y"].shape == X.shape


async def post(client: GrpcClient, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{client.server.rest_port}{path}", json=body, headers={"From": "me"}
        ) as answer,
    ):
        return answer.status, json.loads(await answer.text())


@pytest.mark.parametrize("binary", [False, True])
async def test_a_model_of_the_v2_protocol(tmp_path: Path, binary: bool) -> None:
    async with serving(write(tmp_path)) as client:
        parameters = {"mine": 3, "binary": binary}
        tags = {"x": {"tag": "blue"}}
        answer = await client.infer(
            "mine", {"x": X, "names": text("é")}, id="seven", parameters=parameters, input_parameters=tags
        )
        assert (answer.outputs["y"] == X * 2).all()
        assert answer.outputs["said"].item() == "seven mine None 3 blueé".encode()
        assert answer.parameters == {"took": 0.5}
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2]]}], "id": "a"}
        status, document = await post(client, "/v2/models/mine/infer", body)
        assert (status, document["outputs"][0]["data"]) == (200, [2, 4])
        assert document["outputs"][1]["data"] == ["a mine me None None"]


async def test_a_name_of_ones_own(tmp_path: Path) -> None:
    """As with --model-name: the class is constructed with it."""
    async with serving({"sample": write(tmp_path)}) as client:
        answer = await client.infer("sample", {"x": X, "names": text("")})
        assert answer.outputs["said"].item() == b"None sample None None None"


async def test_types_that_it_declares(tmp_path: Path) -> None:
    types = """
    def get_input_types(self):
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]

    def get_output_types(self):
        y = {"name": "y", "datatype": "FP32", "shape": [-1, 2]}
        return [y, {"name": "said", "datatype": "BYTES", "shape": [1]}]

    def load(self):"""
    async with serving(write(tmp_path, V2.replace("\n    def load(self):", types))) as client:
        assert ((await client.infer("mine", {"x": X})).outputs["y"] == X * 2).all()
        code, error = await client.failure("mine", {"x": X[0]})
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "x" in error


async def test_errors_and_calls_at_the_same_time(tmp_path: Path) -> None:
    async with serving(write(tmp_path)) as client:
        assert await client.failure("mine", {"x": -X}) == (grpc.StatusCode.INVALID_ARGUMENT, "x is below zero")
        code, error = await client.failure("mine", {"x": np.array([13.0], np.float32)})
        assert code is grpc.StatusCode.INTERNAL
        assert "thirteen" not in error
        seven = np.array([7.0], np.float32)
        answers = await asyncio.gather(*(client.infer("mine", {"x": seven}) for _ in range(3)))
        assert [answer.outputs["y"].tolist() for answer in answers] == [[14.0]] * 3


async def test_a_model_of_the_v1_protocol(tmp_path: Path) -> None:
    async with serving(write(tmp_path, V1)) as client:
        answer = await post(client, "/v1/models/mine:predict", {"instances": [[1, 2], [3, 4]]})
        assert answer == (200, {"predictions": [[2.0, 4.0], [6.0, 8.0]]})
        status, document = await post(client, "/v1/models/mine:predict", {"instances": [[]]})
        assert status == 500
        assert "expected a dict with 'predictions'" in str(document)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (V2.replace("self.ready = True", "pass"), r"Mine is not ready after load\(\)"),
        (
            V2.replace("name: str):", "name: str, more):"),
            "Mine: expected an __init__ that takes the model's name only",
        ),
        (V2.replace("def predict", "def guess"), "Mine has no predict"),
        (V2.replace("return InferResponse", "yield InferResponse"), "generators are not supported"),
        (V2.replace("self.loaded = False", "1 / 0"), r"model\.py:\d+: ZeroDivisionError"),
    ],
)
async def test_what_cannot_be_served(
    tmp_path: Path, source: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Exception, match="1 of the models could not be loaded"):
        async with serving(write(tmp_path, source)):
            pass
    assert re.search(error, caplog.text)
