"""The clients of `triglot.testing`, over real ports: each datatype of a protocol, errors, streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.process import write_model
from triglot import testing
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES

DTYPES = {name: row.dtype for name, row in DATATYPES.items() if name not in TFSERVING_DATATYPES}
LACKS = {
    "tensorflow_rest": ("UINT16", "FP16", "BF16"),
    "grps_grpc": ("BOOL", "UINT16", "UINT32", "UINT64", "BF16"),
    "grps_http": ("BOOL", "UINT16", "UINT32", "UINT64", "BF16"),
}
"""The datatypes that a protocol does not have."""
CODES = {
    "kserve_grpc": triglot.Code.FAILED_PRECONDITION,
    "tensorflow_grpc": triglot.Code.FAILED_PRECONDITION,
} | dict.fromkeys(("grps_grpc", "grps_http"), triglot.Code.INTERNAL)
"""What FAILED_PRECONDITION is in protocols with HTTP's statuses: INVALID_ARGUMENT in others."""


class Identity(triglot.Model):
    """Returns two inputs of any datatype."""

    def __init__(self, datatype: str) -> None:
        self.inputs = [triglot.TensorSpec(name, datatype, [-1, -1]) for name in ("a", "b")]
        self.outputs = self.inputs

    def infer(self, inputs: Any) -> Any:
        return dict(inputs)


class Double(triglot.Model):
    """Doubles the elements of one input."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1]),)

    def infer(self, inputs: Any) -> Any:
        if inputs["x"][0] < 0:
            raise triglot.FailedPrecondition("x: expected 0 or more")
        return {"y": inputs["x"] * 2}


class Counting(Double):
    """Yields each element."""

    def infer(self, inputs: Any) -> Any:
        for element in inputs["x"]:
            yield {"y": element.reshape(1)}


class Scalar(triglot.Model):
    """Returns a tensor without dims."""

    inputs = [triglot.TensorSpec("x", "INT32", [])]
    outputs = [triglot.TensorSpec("y", "INT32", [])]

    def infer(self, inputs: Any) -> Any:
        return {"y": inputs["x"]}


@pytest.fixture(scope="module")
def server() -> Iterator[triglot.inline.RunningServer]:
    models = {name.lower(): Identity(name) for name in DTYPES}
    with testing.serve(models, Double, Counting, Scalar) as server:
        yield server


def elements(datatype: str) -> np.ndarray:
    """Values of shape [2, 3] that only their own dtype holds."""
    if datatype == "BYTES":
        return np.array([[b"", b"a", "ü".encode()], [b"long" * 99, b"1", b" "]], object)
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    dtype = DTYPES[datatype]
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array([[least, most, 1], [2, 3, most - 1]], dtype)
    return np.array([[0.1, -2.5, 3], [1e-3, 0, 7]], dtype)


@pytest.mark.parametrize("protocol", testing.CLIENTS)
@pytest.mark.parametrize("datatype", DTYPES)
def test_tensors_come_back_as_they_are_sent(
    server: triglot.inline.RunningServer, protocol: str, datatype: str
) -> None:
    a = elements(datatype)
    with testing.CLIENTS[protocol](server) as client:
        if datatype in LACKS.get(protocol, ()):
            with pytest.raises(TypeError, match=rf"a: .* {datatype}$"):
                client.infer(datatype.lower(), {"a": a, "b": a})
            return
        outputs = client.infer(datatype.lower(), {"a": a, "b": a[:1]}, version=1)
    assert outputs.keys() == {"a", "b"}
    for array, expected in ((outputs["a"], a), (outputs["b"], a[:1])):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("protocol", testing.CLIENTS)
def test_scalar(server: triglot.inline.RunningServer, protocol: str) -> None:
    with testing.CLIENTS[protocol](server) as client:
        y = client.infer("scalar", {"x": np.array(300, np.int32)})["y"]
    assert (y.dtype.name, y.shape, y.item()) == ("int32", (), 300)


@pytest.mark.parametrize("protocol", testing.CLIENTS)
def test_a_single_output_and_errors(server: triglot.inline.RunningServer, protocol: str) -> None:
    with testing.CLIENTS[protocol](server) as client:
        y = client.infer("double", {"x": np.array([1.5, 2], np.float32)})["y"]
        assert (y.dtype.name, y.tolist()) == ("float32", [3, 4])
        with pytest.raises(triglot.ServingError, match="expected 0 or more") as refused:
            client.infer("double", {"x": np.array([-1], np.float32)})
        assert refused.value.code is CODES.get(protocol, triglot.Code.INVALID_ARGUMENT)
        kind = triglot.Internal if protocol.startswith("grps") else triglot.NotFound
        with pytest.raises(kind, match="missing"):
            client.infer("missing", {"x": np.array([1], np.float32)})


@pytest.mark.parametrize("make", [testing.KServeGrpc, testing.GrpsGrpc])
def test_a_stream(
    server: triglot.inline.RunningServer, make: type[testing.KServeGrpc] | type[testing.GrpsGrpc]
) -> None:
    with make(server.grpc_address) as client:
        answers = client.infer_stream("counting", {"x": np.array([1, 2, 3], np.float32)})
        assert [answer["y"].tolist() for answer in answers] == [[1], [2], [3]]
        with pytest.raises(triglot.ServingError, match="missing"):
            list(client.infer_stream("missing", {"x": np.array([1], np.float32)}))


def test_parameters_and_headers(tmp_path: Path) -> None:
    write_model(
        tmp_path / "seen",
        """
import triglot

class Seen(triglot.Model):
    inputs = []
    outputs = [triglot.TensorSpec("y", "BYTES", [2])]
    takes_parameters = True

    def infer(self, inputs, call):
        return {"y": [str(sorted(call.parameters.items())), call.metadata.get("x-tenant", "")]}
""",
    )
    with testing.serve(tmp_path) as server:
        for make in (testing.KServeGrpc, testing.KServeRest):
            with make(server, headers={"X-Tenant": "t1"}) as client:
                y = client.infer("seen", {}, parameters={"a": 1, "b": "c", "d": True, "e": 0.5})["y"]
                assert y.tolist() == [b"[('a', 1), ('b', 'c'), ('d', True), ('e', 0.5)]", b"t1"]


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP32", "FP64", "BYTES"])
def test_answers_with_typed_elements_and_json(server: triglot.inline.RunningServer, datatype: str) -> None:
    a = elements(datatype)
    asked: list[tuple[type[testing.KServeGrpc | testing.KServeRest], dict[str, bool]]] = [
        (testing.KServeGrpc, {"typed_contents": True}),
        (testing.KServeRest, {"binary_data_output": False}),
    ]
    for make, parameters in asked:
        with make(server) as client:
            outputs = client.infer(datatype.lower(), {"a": a, "b": a}, parameters=parameters)
        assert outputs["b"].dtype == a.dtype
        np.testing.assert_array_equal(outputs["b"], a)
    with testing.KServeGrpc(server) as client, pytest.raises(TypeError, match="parameter 'p': expected bool, int"):
        client.infer(datatype.lower(), {"a": a, "b": a}, parameters={"p": np.int32(1)})  # type: ignore[dict-item]


def test_any_path(server: triglot.inline.RunningServer) -> None:
    with testing.KServeRest(server.url) as client:
        assert client.get("/v2/models/double")["name"] == "double"
        assert client.post("/v1/models/double:predict", {"instances": [1]}) == {"predictions": [2.0]}
        with pytest.raises(triglot.InvalidArgument):
            client.post("/v1/models/double:predict", {"instances": ["a"]})
