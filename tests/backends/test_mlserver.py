"""MLServer's models, as its users write them, through a server's ports; with its package, and without."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from tests.backends.triton_served import GrpcClient, reply, request, serving, text

MODEL = '''
import asyncio
import json
import os
import re
from pathlib import Path

from times import TIMES
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver.utils import get_model_uri


class Mine(MLModel):
    """Multiplies x, and says what it was asked."""

    async def load(self) -> bool:
        self.uri = await get_model_uri(self._settings)
        self.loop = asyncio.get_running_loop()
        self.waiting, self.enough = 0, asyncio.Event()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        assert asyncio.get_running_loop() is self.loop
        by_name = {one.name: one for one in payload.inputs}
        x = self.decode(by_name["x"], default_codec=NumpyCodec)
        if x.ravel()[0] < 0:
            raise InferenceError("x is below zero")
        if x.ravel()[0] == 13:
            raise KeyError("thirteen")
        if x.ravel()[0] == 7:
            self.waiting += 1
            if self.waiting == 3:
                self.enough.set()
            await self.enough.wait()
        said = {
            "id": payload.id, "name": self.name, "version": self.version, "uri": self.uri,
            "mine": getattr(payload.parameters, "mine", None), "extra": self.settings.parameters.extra,
            "tag": getattr(by_name["x"].parameters, "tag", None),
            "header": (payload.parameters.headers or {}).get("from"),
            "names": self.decode(by_name["names"], default_codec=StringCodec) if "names" in by_name else None,
        }
        return InferenceResponse(
            model_name=self.name,
            id=payload.id,
            parameters={"took": 0.5, "odd": ["left out"]},
            outputs=[
                NumpyCodec.encode_output("y", x * TIMES),
                StringCodec.encode_output("said", [json.dumps(said)]),
            ] + [StringCodec.encode_output("said", ["again"])] * bool(getattr(payload.parameters, "twice", False)),
        )

    async def unload(self) -> bool:
        Path(self.uri, "unloaded").touch()
        return True
'''
STREAM = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
import numpy as np

class Counts(MLModel):
    async def predict_stream(self, payloads):
        async for payload in payloads:
            for number in range(int(payload.inputs[0].data[0])):
                yield InferenceResponse(
                    model_name=self.name, outputs=[NumpyCodec.encode_output("n", np.array([number]))]
                )
"""


def write(folder: Path, source: str = MODEL, name: str = "model.py", settings: Any = None) -> Path:
    version = folder / "mine" / "3"
    version.mkdir(parents=True)
    (version / name).write_text(source)
    (version / "times.py").write_text("TIMES = 2\n")
    if settings is not None:
        (version / "model-settings.json").write_text(json.dumps(settings))
    return folder / "mine"


X = np.array([[1.0, 2.0]], np.float32)


async def test_two_outputs_of_one_name_are_an_error(tmp_path: Path) -> None:
    async with serving(write(tmp_path)) as client:
        code, details = await client.failure("mine", {"x": X}, parameters={"twice": True})
        assert code is grpc.StatusCode.INTERNAL
        assert "output 'said': expected one tensor in the model's response, got 2" in details


async def request_seen(client: GrpcClient, **more: Any) -> dict[str, Any]:
    answer = await client.infer("mine", {"x": X, "names": text("é")}, **more)
    assert (answer.outputs["y"] == X * 2).all()
    assert answer.parameters == {"took": 0.5}
    seen: dict[str, Any] = json.loads(answer.outputs["said"].item())
    return seen


async def test_a_class_in_a_model_py(tmp_path: Path) -> None:
    path = write(tmp_path)
    async with serving(path) as client:
        seen = await request_seen(client, id="seven", parameters={"mine": 3})
        assert seen == {
            "id": "seven",
            "name": "mine",
            "version": "3",
            "uri": str(path / "3"),
            "mine": 3,
            "extra": {},
            "tag": None,
            "header": None,
            "names": ["é"],
        }
        assert (await request_seen(client, input_parameters={"x": {"tag": "blue"}}))["tag"] == "blue"
        of_x = {"x": {"content_type": 5}}
        code, message = await client.failure("mine", {"x": X, "names": text("é")}, input_parameters=of_x)
        assert (code, "content_type" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert not (path / "3" / "unloaded").exists()
    assert (path / "3" / "unloaded").exists()


async def test_a_name_of_ones_own(tmp_path: Path) -> None:
    """As with --model-name: it is in the settings."""
    path = write(tmp_path).rename(tmp_path / "export")
    async with serving({"mine": path}) as client:
        assert (await request_seen(client))["name"] == "mine"


async def test_two_folders_with_files_of_one_name(tmp_path: Path) -> None:
    """Each model has the class of its own folder."""
    for name, factor in (("a", 2), ("b", 3)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "runtime.py").write_text(MODEL)
        (folder / "times.py").write_text(f"TIMES = {factor}\n")
        (folder / "model-settings.json").write_text(json.dumps({"name": name, "implementation": "runtime.Mine"}))
    async with serving(tmp_path) as client:
        for name, factor in (("a", 2), ("b", 3)):
            answer = await client.infer(name, {"x": X})
            assert answer.outputs["y"].tolist() == [[factor, 2 * factor]]
    assert not {"runtime", "times"} & sys.modules.keys()


SETTINGS = {
    "name": "theirs",
    "implementation": "runtime.Mine",
    "parameters": {"uri": ".", "version": "v7", "extra": {"a": 1}},
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [-1, 2], "parameters": {"content_type": "np"}},
        {"name": "names", "datatype": "BYTES", "shape": [-1], "parameters": {"content_type": "str"}},
    ],
    "outputs": [
        {"name": "y", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "said", "datatype": "BYTES", "shape": [-1, 1]},
    ],
}


@pytest.mark.parametrize("name", ["model.py", "runtime.py"])
async def test_its_settings(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name=name, settings=SETTINGS)
    async with serving(path) as client:
        seen = await request_seen(client)
        expected = {"name": "theirs", "version": "v7", "extra": {"a": 1}, "names": ["é"]}
        assert {key: seen[key] for key in expected} == expected
        assert os.path.samefile(seen["uri"], path / "3")  # noqa: ASYNC240, PTH121 - once.
        other = await client.infer("mine", {"x": X[0]})  # What is declared is only for clients to read.
        assert other.outputs["y"].tolist() == [[2.0], [4.0]]
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{client.server.rest_port}/v2/models/mine"
            async with session.get(url) as response:
                metadata = await response.json()
            assert metadata["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
            assert metadata["platform"] == "mlserver"
            body = {
                "inputs": [
                    {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
                    {"name": "names", "datatype": "BYTES", "shape": [1], "data": ["b"]},
                ]
            }
            async with session.post(f"{url}/infer", json=body, headers={"From": "me"}) as response:
                answer = await response.json()
            assert answer["outputs"][0]["data"] == [2, 4]
            assert json.loads(answer["outputs"][1]["data"][0])["header"] == "me"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with this one's packages, and a module of its own."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "these.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "only_there.py").touch()
    return folder


@pytest.mark.parametrize("key", ["environment_tarball", "environment_path"])
@pytest.mark.parametrize("name", ["model.py", "runtime.py"])
async def test_an_environment_of_its_own(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str
) -> None:
    """As a folder, or packed beside the settings; it runs in a process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    uri = str(environment) if key == "environment_path" else "env.tar.gz"
    settings = {"implementation": "runtime.Mine", "parameters": {key: uri}}
    path = write(tmp_path, f"import only_there\n{MODEL}", name, settings)
    if key == "environment_tarball":
        with tarfile.open(path / "3" / uri, "w:gz") as file:
            file.add(environment, ".")
    async with serving(path) as client:
        assert (await request_seen(client))["name"] == "mine"


async def test_errors_and_calls_at_the_same_time(tmp_path: Path) -> None:
    async with serving(write(tmp_path)) as client:
        assert await client.failure("mine", {"x": -X}) == (grpc.StatusCode.INVALID_ARGUMENT, "x is below zero")
        code, error = await client.failure("mine", {"x": np.array([13.0], np.float32)})
        assert code is grpc.StatusCode.INTERNAL
        assert "thirteen" not in error
        seven = np.array([7.0], np.float32)
        answers = await asyncio.gather(*(client.infer("mine", {"x": seven}) for _ in range(3)))
        assert [answer.outputs["y"].tolist() for answer in answers] == [[[14.0]]] * 3


async def test_a_stream(tmp_path: Path) -> None:
    async with serving(write(tmp_path, STREAM)) as client:
        asked = request("mine", {"count": np.array([4])})
        messages = [message async for message in client.stream([asked])]
        assert [reply(message.infer_response).outputs["n"].tolist() for message in messages] == [
            [[n]] for n in range(4)
        ]


@pytest.mark.parametrize(
    ("source", "settings", "error"),
    [
        (MODEL.replace("return True", "return False", 1), None, r"Mine.load\(\) returned False, expected True"),
        (MODEL.replace("async def predict", "async def guess"), None, "Mine has no async def predict"),
        (MODEL.replace("self.waiting,", "1 / 0; self.waiting,"), None, r"model\.py:\d+: ZeroDivisionError"),
        (MODEL, {"parameters": {"environment_tarball": "e.tgz"}}, r"/3/e\.tgz: not a usable Python environment"),
        (MODEL, {"max_batch_size": "5"}, "model-settings.json: .*max_batch_size"),
        (MODEL, {"inputs": 5}, "model-settings.json: .*inputs"),
    ],
)
async def test_what_cannot_be_served(
    tmp_path: Path, source: str, settings: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Exception, match="1 of the models could not be loaded"):
        async with serving(write(tmp_path, source, settings=settings)):
            pass
    caplog.set_level("ERROR")
    assert re.search(error, caplog.text, re.DOTALL)


async def test_a_runtime_that_is_not_installed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, name="x.py", settings={"implementation": "mlserver_huggingface.HuggingFaceRuntime"})
    with pytest.raises(Exception, match="1 of the models could not be loaded"):
        async with serving(path):
            pass
    expected = (
        "needs mlserver_huggingface, which is not installed; run: pip install mlserver-huggingface; or write "
    )
    assert expected in caplog.text
