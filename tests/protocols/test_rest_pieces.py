"""Large REST answers leave in pieces, from where they lie, and say the same as when they are joined."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.scripted_models import Inputs, Plain
from tests.transports.live import Live, live
from triglot.core.call import Call
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.tensor import SCATTER_BYTES, Array, Scattered
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor
from triglot.protocols.json.text import CHUNK
from triglot.protocols.kserve.rest import HEADER_LENGTH, RestInfer, encode_infer
from triglot.protocols.kserve.routes import kserve_routes
from triglot.protocols.kserve.service import KServe
from triglot.protocols.tfserving.rest_predict import EXACT_ELEMENTS, encode_predict, scatter_predict

COUNT = SCATTER_BYTES


def binary_request(values: Array) -> HttpRequest:
    """All outputs are wanted as binary data, too."""
    size = {"binary_data_size": values.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": values.shape, "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return HttpRequest({"model": "m"}, {HEADER_LENGTH: str(len(head))}, head + values.tobytes(), "POST")


def pieces_of(response: HttpResponse) -> list[Any]:
    return response.body.pieces if isinstance(response.body, Scattered) else [response.body]


def lies_in(piece: Any, memory: Any) -> bool:
    return np.shares_memory(np.frombuffer(piece, np.uint8), np.frombuffer(memory, np.uint8))


async def answer(server: Live, http: HttpRequest) -> HttpResponse:
    """What the row makes of a request, with a real model behind it."""
    dataplane = server.server.dataplane
    routes = kserve_routes(KServe(dataplane, "name", server.server.telemetry))
    route = next(route for route in routes if route.path == "/v2/models/{model}/infer")
    assert route.inference is not None
    decoded = route.decode(http)
    call = Call()
    call.size = len(http.body)
    given = await route.inference.infer(decoded, call)
    assert route.answer_size(given) == 0
    response = route.encode(given, decoded)
    assert isinstance(response, HttpResponse)
    return response


async def test_what_a_model_returns_of_its_input_leaves_from_the_requests_body() -> None:
    http = binary_request(np.arange(COUNT, dtype=np.float32))
    async with live({"m": Plain(lambda inputs: {"y": inputs["x"]})}) as server:
        response = await answer(server, http)
    large = [piece for piece in pieces_of(response) if len(piece) == 4 * COUNT]
    assert len(large) == 1
    assert lies_in(large[0], http.body)


async def test_what_a_model_makes_leaves_from_where_it_was_made() -> None:
    places: list[int] = []

    def make(inputs: Inputs) -> dict[str, Any]:
        made = inputs["x"] * 2
        places.append(made.ctypes.data)
        return {"y": made}

    values = np.arange(COUNT, dtype=np.float32)
    async with live({"m": Plain(make)}) as server:
        response = await answer(server, binary_request(values))
    large = [piece for piece in pieces_of(response) if len(piece) == 4 * COUNT]
    assert [np.frombuffer(piece, np.uint8).ctypes.data for piece in large] == places
    np.testing.assert_array_equal(np.frombuffer(large[0], np.float32), values * 2)


async def test_kept_array_is_copied_before_the_model_reuses_it() -> None:
    kept = np.zeros(COUNT, np.float32)

    def rewrite(inputs: Inputs) -> dict[str, Any]:
        kept[:] = inputs["x"]
        return {"y": kept}

    ones, twos = np.full(COUNT, 1, np.float32), np.full(COUNT, 2, np.float32)
    async with live({"m": Plain(rewrite)}) as server:
        first = await answer(server, binary_request(ones))
        await answer(server, binary_request(twos))
    assert bytes(first.body).endswith(ones.tobytes())


NAMES = st.sampled_from(["FP32", "INT64", "BOOL", "FP64", "BYTES"])
SIZES = st.sampled_from([0, 1, 100, CHUNK + 1, COUNT])


def output(name: str, datatype: str, size: int) -> OutputTensor:
    array: Array = np.arange(size) % 7
    if datatype == "BYTES":
        array = np.array([b"%d" % value for value in array[:100]], object)
    else:
        dtypes: dict[str, Any] = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_, "FP64": np.float64}
        array = array.astype(dtypes[datatype])
    return OutputTensor(name, datatype, array)


@given(st.lists(st.tuples(NAMES, SIZES, st.booleans()), max_size=4))
def test_pieces_say_what_small_answers_say(chosen: list[tuple[str, int, bool]]) -> None:
    outputs = [output(f"y{at}", datatype, size) for at, (datatype, size, _) in enumerate(chosen)]
    binary = {f"y{at}" for at, (_, _, wanted) in enumerate(chosen) if wanted}
    request = InferenceRequest("m", outputs=[output.name for output in outputs])
    response = encode_infer(
        InferenceResponse("m", "1", "", outputs), RestInfer(request, frozenset(binary), binary_by_default=False)
    )
    body = bytes(response.body)
    assert len(body) == len(response.body)
    length = int(dict(response.headers).get("Inference-Header-Content-Length", len(body)))
    at = length
    for described, sent in zip(json.loads(body[:length])["outputs"], outputs, strict=True):
        if sent.name in binary:
            end = at + described["parameters"]["binary_data_size"]
            if sent.datatype != "BYTES":
                assert body[at:end] == sent.array.tobytes()
            at = end
        else:
            values = [text.decode() for text in sent.array] if sent.datatype == "BYTES" else sent.array.tolist()
            assert described["data"] == values
    assert at == len(body)


@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize(
    ("shape", "datatype"),
    [
        ((3,), "FP32"),
        ((2, EXACT_ELEMENTS), "INT32"),
        ((EXACT_ELEMENTS + 1,), "FP32"),
        ((3 * CHUNK,), "INT32"),
        ((2, CHUNK + 1), "FP32"),
        ((CHUNK, 2), "INT32"),
        ((CHUNK // 2, 2, 2), "FP32"),
    ],
)
def test_a_large_prediction_is_not_joined(shape: tuple[int, ...], row: bool, datatype: str) -> None:
    values = (np.arange(np.prod(shape)) / 7).reshape(shape)
    outputs = [OutputTensor("y", datatype, values.astype(np.float32 if datatype == "FP32" else np.int32))]
    joined = encode_predict(outputs, row)
    pieces = scatter_predict(outputs, row)
    assert bytes(pieces) == joined
    assert isinstance(pieces, Scattered) == (values.size > EXACT_ELEMENTS)
    twice = [*outputs, OutputTensor("z", datatype, outputs[0].array)]
    assert scatter_predict(twice, row) == encode_predict(twice, row)
