"""Inference answers over REST: JSON, binary, and both at once (spec 0.6, 0.7, 3.3, 3.7)."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpResponse
from triglot.core.tensor import DATATYPES, Array, datatype_of, object_array
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor
from triglot.protocols.kserve.json_elements import NO_JSON
from triglot.protocols.kserve.rest import RestInfer, encode_infer

F4 = np.array([[3.0]], "f4")


def encode(
    arrays: dict[str, Array], binary: str = "", *, listed: bool = True, request_id: str = "", **parameters: Any
) -> HttpResponse:
    """An answer whose outputs are asked for by name, or all of them by default."""
    outputs = [OutputTensor(name, datatype_of(array), array) for name, array in arrays.items()]
    names = list(arrays) if listed else []
    wanted = RestInfer(InferenceRequest("m", outputs=names), frozenset(binary), binary_by_default=bool(binary))
    return encode_infer(InferenceResponse("m", "1", request_id, outputs, parameters), wanted)


def parts(response: HttpResponse) -> tuple[Any, bytes]:
    body = bytes(response.body)
    length = int(dict(response.headers).get("Inference-Header-Content-Length", len(body)))
    return json.loads(body[:length]), body[length:]


def test_golden_binary_answer() -> None:
    response = encode({"y": F4}, "y", request_id="7")
    head, tail = parts(response)
    assert head == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}],
    }
    assert tail.hex() == "00004040"
    assert response.status == 200
    assert response.content_type == "application/octet-stream"
    assert response.headers == {"Inference-Header-Content-Length": str(len(response.body) - 4)}


def test_json_answer() -> None:
    response = encode({"y": F4})
    assert json.loads(bytes(response.body)) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}],
    }
    assert (response.status, response.content_type, response.headers) == (200, "application/json", {})


def test_json_and_binary_outputs_side_by_side() -> None:
    arrays = {"a": np.array([1], "i4"), "b": np.array([2], "i4"), "c": np.array([3, 4], "i4")}
    head, tail = parts(encode(arrays, "ac"))
    assert [output["name"] for output in head["outputs"]] == ["a", "b", "c"]
    assert [output.get("data") for output in head["outputs"]] == [None, [2], None]
    assert [output.get("parameters") for output in head["outputs"]] == [
        {"binary_data_size": 4},
        None,
        {"binary_data_size": 8},
    ]
    assert tail == struct.pack("<3i", 1, 3, 4)


@pytest.mark.parametrize("binary", ["y", ""])
def test_outputs_that_are_not_listed_follow_the_default(binary: str) -> None:
    response = encode({"y": F4, "z": F4}, binary, listed=False)
    assert len(parts(response)[1]) == (8 if binary else 0)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_a_binary_output_without_elements(shape: tuple[int, ...]) -> None:
    response = encode({"y": np.empty(shape, "f4")}, "y")
    assert (response.content_type, response.headers) == ("application/json", {})
    assert json.loads(bytes(response.body))["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": list(shape), "parameters": {"binary_data_size": 0}}
    ]


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 2)])
def test_every_datatype_in_both_forms(name: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    row = DATATYPES[name]
    array = object_array([b"a", b"", "é".encode(), b"d"][:count], shape)
    if row.itemsize:
        array = (np.arange(count) % 2).astype(row.dtype).reshape(shape)
    head, tail = parts(encode({"y": array}, "y"))
    output = head["outputs"][0]
    assert (output["datatype"], output["shape"]) == (name, list(shape))
    assert output["parameters"] == {"binary_data_size": len(tail)}
    if row.itemsize:
        assert tail == array.tobytes()
    if name in NO_JSON:
        with pytest.raises(
            InvalidArgument, match=f"output 'y': {name} has no JSON form; request it as binary data"
        ):
            encode({"y": array})
        return
    output = json.loads(bytes(encode({"y": array}).body))["outputs"][0]
    assert "parameters" not in output
    expected = [element.decode() for element in array.ravel()] if name == "BYTES" else array.ravel().tolist()
    assert repr(output["data"]) == repr(expected)


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype="f4").reshape(2, 3).T, np.arange(3, dtype=">i4"), np.arange(3, dtype=">f8")]
)
def test_other_layouts(array: Array) -> None:
    tail = parts(encode({"y": array}, "y"))[1]
    assert tail == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert json.loads(bytes(encode({"y": array}).body))["outputs"][0]["data"] == array.ravel().tolist()


def test_bytes_that_are_not_utf_8_need_binary_data() -> None:
    array = object_array([b"a", b"\xff"], (2,))
    with pytest.raises(InvalidArgument) as caught:
        encode({"y": array})
    assert caught.value.message.startswith(
        "output 'y' has a BYTES element that is not UTF-8; request it as binary data: "
    )
    assert parts(encode({"y": array}, "y"))[1] == b"\1\0\0\0a\1\0\0\0\xff"


def test_tokens_beyond_json_are_bare() -> None:
    body = bytes(encode({"y": np.array([np.nan, np.inf, -np.inf, 1.5])}).body)
    assert b'"data":[NaN,Infinity,-Infinity,1.5]' in body


def test_integers_are_bare_and_exact() -> None:
    body = bytes(encode({"a": np.array([-(2**63), 2**63 - 1]), "b": np.array([2**64 - 1], "u8")}).body)
    assert b'"data":[-9223372036854775808,9223372036854775807]' in body
    assert b'"data":[18446744073709551615]' in body


def test_parameters_and_text_of_the_answer() -> None:
    head = json.loads(bytes(encode({}, request_id='é"\n', flag=False, count=1, text='"').body))
    assert head == {
        "model_name": "m",
        "model_version": "1",
        "id": 'é"\n',
        "parameters": {"flag": False, "count": 1, "text": '"'},
        "outputs": [],
    }
