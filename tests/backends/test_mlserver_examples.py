"""What the examples of MLServer's documentation do with classes of one's own, with requests shaped as there."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process import SECONDS, Triglot
from tests.protocol_clients.rest import Rest

pytest.importorskip("mlserver", reason="the mlserver environment has it")

from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from tests.backends.test_mlserver_stock import HERE

# Reads its numbers from the file of `parameters.uri`, and answers with a scalar.
MEAN = """
import json

import numpy as np
from mlserver import MLModel, types
from mlserver.utils import get_model_uri


class Mean(MLModel):
    async def load(self) -> bool:
        with open(await get_model_uri(self._settings)) as file:
            self._samples = np.array(json.load(file))
        self.ready = True
        return self.ready

    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        mean = (self._samples * np.array(payload.inputs[0].data)).mean()
        data = np.asarray(mean).tolist()
        output = types.ResponseOutput(name="mean", shape=mean.shape, datatype="FP32", data=data)
        return types.InferenceResponse(
            id=payload.id, model_name=self.name, model_version=self.version, outputs=[output]
        )
"""
# Prints each request as JSON, and returns its inputs and what they are decoded to.
ECHO = """
import json

from mlserver import MLModel
from mlserver.codecs import DecodedParameterName, NumpyCodec, register_input_codec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

HIDDEN = {"parameters": {DecodedParameterName, "headers"}}


@register_input_codec
class Halves(NumpyCodec):
    ContentType = "halves"

    @classmethod
    def decode_input(cls, request_input):
        return super().decode_input(request_input) / 2


class Echo(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        outputs = []
        for sent in payload.inputs:
            print(json.dumps(sent.dict(exclude=HIDDEN)))
            outputs.append(
                ResponseOutput(name=sent.name, datatype=sent.datatype, shape=sent.shape, data=sent.data)
            )
            decoded = self.decode(sent)
            text = repr(decoded if isinstance(decoded, list) else decoded.tolist())
            outputs.append(ResponseOutput(name=f"{sent.name}:", datatype="BYTES", shape=[1], data=[text]))
        return InferenceResponse(model_name=self.name, outputs=outputs)
"""
WORDS = """
from typing import AsyncIterator

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Words(MLModel):
    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        payload = [payload async for payload in payloads][0]
        for word in StringCodec.decode_input(payload.inputs[0])[0].split(" "):
            output = StringCodec.encode_output(name="output", payload=[word], use_bytes=True)
            yield InferenceResponse(model_name=self._settings.name, outputs=[output])
"""


def write(folder: Path, name: str, implementation: str, source: str, **settings: Any) -> Path:
    (folder / name).mkdir(parents=True)
    values = {"name": name, "implementation": implementation, **settings}
    (folder / name / "model-settings.json").write_text(json.dumps(values))
    (folder / name / f"{implementation.partition('.')[0]}.py").write_text(source)
    return folder / name


def tensor(name: str, datatype: str, shape: list[int], content_type: str = "") -> dict[str, Any]:
    parameters = {"parameters": {"content_type": content_type}} if content_type else {}
    return {"name": name, "datatype": datatype, "shape": shape} | parameters


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "settings.json").write_text('{"debug": "true", "parallel_workers": 0, "gzip_enabled": false}')
    mean = write(folder, "mean", "models.Mean", MEAN, parameters={"uri": "./samples.json"})
    (mean / "samples.json").write_text("[1.0, 2.0]")
    write(folder, "echo", "runtime.Echo", ECHO)
    declared = [tensor("numbers", "INT32", [2, 2], "np"), tensor("text", "BYTES", [11], "str")]
    write(folder, "declared", "runtime.Echo", ECHO, inputs=declared)
    write(
        folder,
        "words",
        "text_model.Words",
        WORDS,
        versions=["words/v1.2.3"],
        platform="mlserver",
        inputs=[tensor("prompt", "BYTES", [1])],
        outputs=[tensor("output", "BYTES", [1])],
    )
    with Triglot(folder, command="mlserver", environment=HERE) as triglot:
        yield Rest(triglot.ports()[1])


def infer(rest: Rest, model: str, *inputs: dict[str, Any]) -> dict[str, Any]:
    """The data of the outputs by name."""
    status, answer = rest.post(f"/v2/models/{model}/infer", {"inputs": inputs})
    assert status == 200, answer
    return {output["name"]: output["data"] for output in answer["outputs"]}


def test_scalar_output(rest: Rest) -> None:
    assert infer(rest, "mean", tensor("marriage", "FP32", [1]) | {"data": [28.0]}) == {"mean": [42.0]}


def test_one_text_without_a_list_has_any_shape(rest: Rest) -> None:
    """By the content types of the request, and by those of the settings."""
    numbers, text = {"data": [1, 2, 3, 4]}, {"data": "hello world 😁"}
    expected = {
        "numbers": [1, 2, 3, 4],
        "numbers:": ["[[1, 2], [3, 4]]"],
        "text": ["hello world 😁"],
        "text:": ["['hello world 😁']"],
    }
    typed = tensor("numbers", "INT32", [2, 2], "np") | numbers, tensor("text", "BYTES", [1], "str") | text
    assert infer(rest, "echo", *typed) == expected
    plain = tensor("numbers", "INT32", [2, 2]) | numbers, tensor("text", "BYTES", [11]) | text
    assert infer(rest, "declared", *plain) == expected


def test_declared_tensors_are_only_for_clients_to_read(rest: Rest) -> None:
    assert infer(rest, "declared", tensor("other", "FP32", [1], "np") | {"data": [0.5]})["other"] == [0.5]
    status, metadata = rest.get("/v2/models/declared")
    assert (status, metadata["inputs"][0]) == (200, tensor("numbers", "INT32", [2, 2]))


def test_codecs_of_the_client(rest: Rest) -> None:
    """The texts of JSON are texts for the class, which prints the request as JSON."""
    request = InferenceRequest(
        inputs=[
            NumpyCodec.encode_input("numbers", np.array([[1, 2], [3, 4]])),
            StringCodec.encode_input("text", ["hello world 😁"], use_bytes=False),
        ]
    )
    status, answer = rest.post("/v2/models/echo/infer", request.model_dump())
    assert status == 200, answer
    numbers, _, text, _ = InferenceResponse.model_validate(answer).outputs
    assert NumpyCodec.decode_output(numbers).tolist() == [[1, 2], [3, 4]]
    assert StringCodec.decode_output(text) == ["hello world 😁"]


def test_codec_of_ones_own(rest: Rest) -> None:
    found = infer(rest, "echo", tensor("x", "INT32", [2], "halves") | {"data": [1, 2]})
    assert found["x:"] == ["[0.5, 1.0]"]


@pytest.mark.parametrize("call", ["infer_stream", "generate_stream"])
def test_stream(rest: Rest, call: str) -> None:
    """Its responses are those of infer by either path."""
    prompt = tensor("prompt", "BYTES", [1], "str") | {"data": ["What is it?"]}
    body = json.dumps({"inputs": [prompt], "outputs": [{"name": "output"}]}).encode()
    url = f"http://127.0.0.1:{rest.port}/v2/models/words/{call}"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=SECONDS) as response:
        assert response.headers.get_content_type() == "text/event-stream"
        events = [line.removeprefix(b"data: ") for line in response if line.strip()]
    outputs = [InferenceResponse.model_validate_json(event).outputs[0] for event in events]
    assert [StringCodec.decode_output(output) for output in outputs] == [["What"], ["is"], ["it?"]]
    status, answer = rest.post("/v2/models/words/generate", body)
    assert (status, "use generate stream" in answer["error"]) == (501, True)


def test_generate_is_infer_for_a_request_of_infer(rest: Rest) -> None:
    body = {"id": "7", "inputs": [tensor("marriage", "FP32", [1]) | {"data": [28.0]}]}
    assert rest.post("/v2/models/mean/generate", body) == rest.post("/v2/models/mean/infer", body)
