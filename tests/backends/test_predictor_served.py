"""A custom prediction routine in a real server, as clients of each protocol see it."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from triglot.core.tensor import pack_bytes, unpack_bytes
from triglot.pb.kserve import inference_pb2 as pb

# As AI Platform's own guide has it: a predictor, and a pickled object of a module that it does not import.
PREDICTOR = """
import os
import pickle

class Predictor(object):
    def __init__(self, centerer):
        self._centerer = centerer

    @classmethod
    def from_path(cls, model_dir):
        with open(os.path.join(model_dir, "centerer.pkl"), "rb") as file:
            return cls(pickle.load(file))

    def predict(self, instances, **kwargs):
        if kwargs.get("fail"):
            raise RuntimeError("Divide by zero")
        if kwargs.get("no_json"):
            return [object()]
        outputs = [self._centerer.centered(instance) for instance in instances]
        return [max(output) for output in outputs] if kwargs.get("largest") else outputs
"""
CENTERER = """
class Centerer(object):
    means = None

    def centered(self, row):
        return [value - mean - VERSION for value, mean in zip(row, self.means)]
"""
CENTERER_PICKLE = b"ccentering\nCenterer\n)\x81}X\x05\x00\x00\x00means](K\x01K\x02esb."
"""A `centering.Centerer` with means [1, 2]."""


def write(folder: Path, version: int) -> None:
    """A version of the model, whose code is a package as it was deployed to AI Platform."""
    folder.mkdir(parents=True)
    with tarfile.open(folder / "code-0.1.tar.gz", "w:gz") as archive:
        centerer = CENTERER.replace("VERSION", str(version))
        for name, text in {"predictor.py": PREDICTOR, "centering.py": centerer, "setup.py": "1 / 0"}.items():
            member = tarfile.TarInfo(f"code-0.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    (folder / "centerer.pkl").write_bytes(CENTERER_PICKLE)
    (folder / "predictor.toml").write_text(
        'prediction_class = "predictor.Predictor"\npackages = ["code-0.1.tar.gz"]\n'
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triglot]:
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 2):
        write(folder / "centered" / str(version), version * 100)
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as process:
        yield process
        process.stop()


@pytest.fixture(scope="module")
def rest(server: Triglot) -> Rest:
    return Rest(server.ports()[1])


def test_metadata(rest: Rest) -> None:
    status, text = rest.get("/v2/models/centered")
    assert (status, text["platform"]) == (200, "predictor")
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in text["inputs"]] == [
        ("instances", "BYTES", [-1]),
        ("parameters", "BYTES", [1]),
    ]
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in text["outputs"]] == [
        ("predictions", "BYTES", [1])
    ]


@pytest.mark.parametrize(("version", "expected"), [("1", [-99, -99]), ("2", [-199, -199])])
def test_v2_over_grpc(server: Triglot, version: str, expected: list[int]) -> None:
    request = pb.ModelInferRequest(model_name="centered", model_version=version)
    request.inputs.add(name="instances", datatype="BYTES", shape=[2])
    request.raw_input_contents.append(pack_bytes([b"[2, 3]", b"[12, NaN]"]))
    with grpc_channel(server.ports()[0]) as channel:
        reply = rpc(channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    (predictions,) = unpack_bytes(reply.raw_output_contents[0], 1)
    first, (second, missing) = json.loads(predictions)
    assert (first, second) == (expected, expected[0] + 10)
    assert math.isnan(missing)


def test_v2_over_rest(rest: Rest) -> None:
    body = {
        "inputs": [
            {"name": "instances", "datatype": "BYTES", "shape": [1], "data": ["[2, 3]"]},
            {"name": "parameters", "datatype": "BYTES", "shape": [1], "data": ['{"largest": true}']},
        ]
    }
    status, answer = rest.post("/v2/models/centered/infer", body)
    assert (status, answer["outputs"][0]["data"]) == (200, ["[-199]"])


PROJECT = "/v1/projects/p/models/centered"


def test_instances(rest: Rest) -> None:
    assert rest.post(f"{PROJECT}:predict", {"instances": [[2, 3]]}) == (200, {"predictions": [[-199, -199]]})
    body = {"instances": [[2, 3]], "largest": True}
    assert rest.post(f"{PROJECT}/versions/1:predict", body) == (200, {"predictions": [-99]})


def test_names_of_versions(tmp_path: Path) -> None:
    for version in (1, 2):
        write(tmp_path / "centered" / str(version), version * 100)
    file = tmp_path / "centered" / "versions.toml"
    file.write_text('default = "v1"\n[versions]\nv1 = 1\nv2_beta = 2\n')
    body: dict[str, object] = {"instances": [[2, 3]]}
    with Triglot(tmp_path, *FREE_PORTS, "--watch", "--poll-interval", "0.05", "--drain-delay", "0") as process:
        rest = Rest(process.ports()[1])
        first, second = (200, {"predictions": [[-99, -99]]}), (200, {"predictions": [[-199, -199]]})
        assert rest.post(f"{PROJECT}/versions/v1:predict", body) == first
        assert rest.post(f"{PROJECT}/versions/v2_beta:predict", body) == second
        assert rest.post("/v1/models/centered/labels/v2_beta:predict", body) == second
        assert rest.post(f"{PROJECT}:predict", body) == first
        assert rest.post("/v1/models/centered:predict", body) == first
        status, answer = rest.post(f"{PROJECT}/versions/v3:predict", body)
        assert (status, answer["error"]["status"]) == (404, "NOT_FOUND")
        new = file.with_name("new.toml")
        new.write_text(file.read_text().replace('"v1"', '"v2_beta"'))
        new.rename(file)
        wait_until(lambda: rest.post(f"{PROJECT}:predict", body) == second)


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_an_exceptions_text_reaches_the_client(tmp_path: Path, execution: str) -> None:
    write(tmp_path / "centered" / "1", 0)
    parameter = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    (tmp_path / "centered" / "config.pbtxt").write_text(parameter)
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as process:
        rest = Rest(process.ports()[1])
        assert rest.post(f"{PROJECT}:predict", {"instances": [[2, 3]], "fail": True}) == (
            500,
            {"error": "Divide by zero"},
        )
        process.stderr.wait_for("RuntimeError: Divide by zero")
        status, answer = rest.post(f"{PROJECT}:predict", {"instances": [[2, 3]], "no_json": True})
        assert status == 500
        assert answer["error"].startswith("There was a problem processing the outputs: ")
        assert rest.post(f"{PROJECT}:predict", {"instances": [[2, 3]]}) == (200, {"predictions": [[1, 1]]})


def test_what_is_left_out(rest: Rest) -> None:
    status, answer = rest.post("/v2/models/centered/infer", {"inputs": []})
    assert status == 400
    assert "missing required input(s) ['instances']" in answer["error"]
