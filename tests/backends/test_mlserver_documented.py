"""Custom runtimes as MLServer's documentation shows them, and its codecs; with its package, and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.backends.triton_served import GrpcClient, reply, request, serving, text
from triglot.backends.mlserver import provide

ARGUMENTS = """
from typing import List, Optional

import numpy as np
from mlserver import MLModel
from mlserver.codecs import decode_args

class Mine(MLModel):
    @decode_args
    async def predict(
        self, questions: List[str], weights: np.ndarray, bias: Optional[np.ndarray] = None
    ) -> (np.ndarray, List[str]):
        return weights.sum(axis=1) + (0 if bias is None else bias), [question.upper() for question in questions]
"""
JSON = """
import json

from mlserver import MLModel, types
from mlserver.codecs import StringCodec
from mlserver.logging import logger

class Mine(MLModel):
    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        asked = {}
        for tensor in payload.inputs:
            asked[tensor.name] = json.loads("".join(self.decode(tensor, default_codec=StringCodec)))
        logger.info("asked %s", asked)
        answer = json.dumps({"asked": asked}).encode("UTF-8")
        return types.InferenceResponse(
            id=payload.id, model_name=self.name, model_version=self.version,
            outputs=[
                types.ResponseOutput(
                    name="answer", shape=[len(answer)], datatype="BYTES", data=[answer],
                    parameters=types.Parameters(content_type="str"),
                )
            ],
        )
"""
WORDS = """
from typing import AsyncIterator

import mlserver
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

class Mine(MLModel):
    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        payload = [payload async for payload in payloads][0]
        for word in StringCodec.decode_input(payload.inputs[0])[0].split(" "):
            yield InferenceResponse(
                model_name=self.name,
                outputs=[StringCodec.encode_output(name="output", payload=[word], use_bytes=True)],
            )
"""
METRICS = """
import mlserver
from mlserver import MLModel
from mlserver.codecs import NumpyRequestCodec, NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor

class Mine(MLModel):
    async def load(self) -> bool:
        mlserver.register("asked_rows", "Rows of requests")
        self.inputs = [MetadataTensor(name="x", datatype="FP32", shape=[-1, 2])]
        self.outputs = [MetadataTensor(name="output-1", datatype="FP32", shape=[-1, 1])]
        return await super().load()

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = self.decode_request(payload, default_codec=NumpyRequestCodec)
        mlserver.log(asked_rows=len(x))
        return self.encode_response(x.sum(axis=1), default_codec=NumpyRequestCodec)
"""


@pytest.fixture(autouse=True, scope="module")
def package() -> None:
    """The package, or what stands in for it, is importable."""
    provide()


def write(folder: Path, source: str) -> Path:
    version = folder / "mine" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    return folder / "mine"


async def test_arguments_by_their_type_hints(tmp_path: Path) -> None:
    x = {"questions": np.array([b"why", b"how"], object), "weights": np.array([[1, 2], [3, 4]], np.float32)}
    async with serving(write(tmp_path, ARGUMENTS)) as client:
        answer = await client.infer("mine", x)
        assert answer.outputs["output-0"].tolist() == [[3.0], [7.0]]
        assert answer.outputs["output-1"].tolist() == [[b"WHY"], [b"HOW"]]
        bias = {"bias": np.array([1, 1], np.float32)}
        assert (await client.infer("mine", x | bias)).outputs["output-0"].tolist() == [[4.0], [8.0]]
        code, error = await client.failure("mine", x | {"other": np.array([1.0])})
        assert code.name == "INVALID_ARGUMENT"
        assert "other" in error


async def test_json_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = """
    @custom_handler(rest_path="/mine")
    async def own(self): ...
"""
    head = "from mlserver.handlers import custom_handler"
    async with serving(write(tmp_path, f"{head}{JSON}{own}")) as client:
        assert "Mine.own: its custom_handler has no route here" in caplog.text
        answer = await client.infer("mine", {"a": text('{"b": [1, 2]}')})
        assert json.loads(answer.outputs["answer"].item()) == {"asked": {"a": {"b": [1, 2]}}}
        url = f"http://127.0.0.1:{client.server.rest_port}/v2/models/mine/predict"
        async with aiohttp.ClientSession() as session, session.post(url, json={"a": "1"}) as response:
            error = "model 'mine' declares no inputs, so plain JSON has no datatypes; use /infer"
            assert (response.status, await response.json()) == (400, {"error": error})


async def test_a_stream_of_words(tmp_path: Path) -> None:
    async with serving(write(tmp_path, WORDS)) as client:
        messages = [message async for message in client.stream([request("mine", {"prompt": text("one two")})])]
    assert [reply(message.infer_response).outputs["output"].item() for message in messages] == [b"one", b"two"]


async def test_declared_tensors_and_metrics(tmp_path: Path) -> None:
    async with serving(write(tmp_path, METRICS)) as client:
        answer = await client.infer("mine", {"x": np.array([[1, 2], [3, 4]], np.float32)})
        assert answer.outputs["output-1"].tolist() == [[3.0], [7.0]]
        assert 'asked_rows_sum{model_name="mine",model_version="1"} 2.0\n' in await page(client)


async def page(client: GrpcClient) -> str:
    """The metrics."""
    url = f"http://127.0.0.1:{client.server.rest_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


@pytest.mark.parametrize(
    ("name", "value", "encoded"),
    [
        ("NumpyCodec", np.array([[1, 2]], np.int8), ("INT8", [1, 2], [1, 2], "np")),
        ("NumpyCodec", np.array([1.0, np.nan], np.float32), ("FP32", [2, 1], [1.0, None], "np")),
        ("NumpyCodec", np.array(["é"]), ("BYTES", [1, 1], ["é".encode()], "np")),
        ("StringCodec", ["é", ""], ("BYTES", [2, 1], ["é".encode(), b""], "str")),
        ("Base64Codec", [b"\x00\xff"], ("BYTES", [1, 1], [b"AP8="], "base64")),
        ("DatetimeCodec", [datetime(2021, 8, 24, 15, 1)], ("BYTES", [1, 1], [b"2021-08-24T15:01:00"], "datetime")),
    ],
)
def test_codecs_of_tensors(name: str, value: Any, encoded: tuple[Any, ...]) -> None:
    from mlserver import codecs  # noqa: PLC0415 - provided above.

    codec = getattr(codecs, name)
    output = codec.encode_output("x", value)
    assert (output.datatype, output.shape, output.data.root, output.parameters.content_type) == encoded
    assert codec.can_encode(value)
    if name != "NumpyCodec" or value.dtype.kind == "i":
        assert np.array_equal(codec.decode_input(codec.encode_input("x", value)), value)
        assert np.array_equal(codec.decode_output(output), value)


def test_codecs_of_requests() -> None:
    from mlserver.codecs import NumpyRequestCodec, StringRequestCodec  # noqa: PLC0415 - provided above.
    from mlserver.types import InferenceRequest  # noqa: PLC0415 - as above.

    asked = NumpyRequestCodec.encode_request(np.array([[1.0]]))
    assert asked.model_dump() == {
        "parameters": {"content_type": "np"},
        "inputs": [
            {
                "name": "input-1",
                "shape": [1, 1],
                "datatype": "FP64",
                "data": [1.0],
                "parameters": {"content_type": "np"},
            }
        ],
    }
    assert NumpyRequestCodec.decode_request(InferenceRequest(**asked.model_dump())).tolist() == [[1.0]]
    answer = StringRequestCodec.encode_response("m", ["a"], "1")
    assert (answer.model_name, answer.model_version, answer.outputs[0].name) == ("m", "1", "output-1")
    assert StringRequestCodec.decode_response(answer) == ["a"]


def test_codec_of_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    from mlserver.codecs import PandasCodec  # noqa: PLC0415 - provided above.

    frame = pandas.DataFrame(
        {"n": [1.5, None], "text": pandas.Series(["a", "é"], dtype=object), "any": [{"b": 1}, [2]]}
    )
    asked = PandasCodec.encode_request(frame)
    assert [(tensor.name, tensor.datatype, tensor.shape, tensor.data.root) for tensor in asked.inputs] == [
        ("n", "FP64", [2, 1], [1.5, None]),
        ("text", "BYTES", [2, 1], [b"a", "é".encode()]),
        ("any", "BYTES", [2, 1], [b'{"b":1}', b"[2]"]),
    ]
    assert asked.parameters.content_type == "pd"
    decoded = PandasCodec.decode_request(asked)
    assert decoded["n"].tolist()[0] == 1.5
    assert decoded["any"].tolist() == frame["any"].tolist()


def wrong_request() -> Any:
    from mlserver.types import InferenceRequest  # noqa: PLC0415 - provided above.

    return InferenceRequest(inputs=[{"name": "x", "shape": "1", "datatype": "FP32", "data": [1]}])


def wrong_datatype() -> Any:
    from mlserver.types import ResponseOutput  # noqa: PLC0415 - provided above.

    return ResponseOutput(name="x", shape=[1], datatype="FP8", data=[1])


@pytest.mark.parametrize("make", [wrong_request, wrong_datatype])
def test_wrong_values_are_errors(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"shape|datatype"):
        make()
