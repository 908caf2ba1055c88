"""Raw binary requests: a body that is nothing but a tensor (spec 3.3)."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.process import PLAIN_MODELS
from tests.protocols.kserve_served import MODELS, Served, serve_models
from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest
from triglot.core.tensor import DATATYPES
from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs
from triglot.protocols.kserve.rest import decode_raw, is_raw

LENGTH = "Inference-Header-Content-Length"
RAW = {LENGTH: "0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_models(
        (MODELS, *(PLAIN_MODELS / name for name in ("half_plus_two", "uppercase", "token_stream")))
    ) as opened:
        yield opened


async def send(
    served: Served, model: str, body: bytes, headers: Mapping[str, str] = RAW
) -> tuple[int, Any, bytes]:
    """Status, the JSON part, and what follows it."""
    status, answered, reply = await served.rest.call("POST", f"/v2/models/{model}/infer", body, headers)
    at = int(answered.get(LENGTH, len(reply)))
    return status, json.loads(reply[:at]), reply[at:]


def http(body: bytes) -> HttpRequest:
    return HttpRequest({"model": "m"}, {LENGTH.lower(): "0"}, body)


@pytest.mark.asyncio(loop_scope="module")
async def test_one_tensor_in_and_all_outputs_in_binary_form(served: Served) -> None:
    body = np.array([1, 2, 3], "f4").tobytes()
    for model in ("half_plus_two", "half_plus_two/versions/1"):
        status, head, tail = await send(served, model, body)
        assert (status, head["model_name"]) == (200, "half_plus_two")
        assert head["outputs"] == [
            {"name": "y", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 12}}
        ]
        assert np.frombuffer(tail, "f4").tolist() == [2.5, 3.0, 3.5]
    assert (await send(served, "half_plus_two", gzip.compress(body), RAW | {"Content-Encoding": "gzip"}))[
        2
    ] == tail
    assert (await send(served, "half_plus_two", body, {LENGTH: "000"}))[2] == tail


@pytest.mark.asyncio(loop_scope="module")
async def test_a_large_one(served: Served) -> None:
    array = np.arange(2**20, dtype="f4")
    status, head, tail = await send(served, "half_plus_two", array.tobytes())
    assert (status, head["outputs"][0]["shape"]) == (200, [2**20])
    assert np.array_equal(np.frombuffer(tail, "f4"), array * np.float32(0.5) + 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_without_dims(served: Served) -> None:
    status, head, tail = await send(served, "scalar", np.array(2, "f8").tobytes())
    assert (status, head["outputs"][0]["shape"]) == (200, [])
    assert np.frombuffer(tail, "f8").tolist() == [3.0]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("model", "body", "status", "text"),
    [
        ("none", b"", 404, "Request for unknown model: 'none' is not found"),
        (
            "two_inputs",
            bytes(4),
            400,
            "a raw binary request requires a model with 1 input, model 'two_inputs' has 2",
        ),
        ("half_plus_two", bytes(5), 400, "[request id: <id_unknown>] input byte size mismatch for input 'x'"),
        ("scalar", bytes(4), 400, "[request id: <id_unknown>] input byte size mismatch for input 'x'"),
        ("words", b"a", 501, "HTTP end point doesn't support models with decoupled transaction policy"),
        (
            "any_rank",
            bytes(4),
            400,
            "raw binary request for input 'x' of model 'any_rank': only one dim can be",
        ),
    ],
)
async def test_requests_that_are_refused(model: str, body: bytes, status: int, text: str, served: Served) -> None:
    found, reply, _ = await send(served, model, body)
    assert (found, list(reply)) == (status, ["error"])
    assert reply["error"].startswith(text)


def bound(spec: TensorSpec, body: bytes, max_batch_size: int = 0) -> Any:
    """The array that the model gets."""
    signature = Signature((spec,), (), max_batch_size)
    assert is_raw(http(body))
    asked = decode_raw(http(body), signature)
    assert asked.wants_binary("whatever")
    return bind_inputs(signature, asked.request)[spec.name]


@pytest.mark.parametrize(
    ("shape", "batches", "count", "expected"),
    [
        ([-1], 0, 6, (6,)),
        ([-1], 0, 0, (0,)),
        ([-1, 3], 0, 6, (2, 3)),
        ([2, 3], 0, 6, (2, 3)),
        ([], 0, 1, ()),
        ([-1, 3], 8, 3, (1, 3)),
        ([-1, -1, 3], 8, 6, (1, 2, 3)),
        ([-1], 8, 1, (1,)),
    ],
)
def test_shapes(shape: list[int], batches: int, count: int, expected: tuple[int, ...]) -> None:
    array = bound(TensorSpec("x", "INT16", shape), np.arange(count, dtype="i2").tobytes(), batches)
    assert array.shape == expected
    assert array.ravel().tolist() == list(range(count))


@pytest.mark.parametrize("body", [b"", b"text", b"\xff\0" * 3])
def test_text_is_the_whole_body(body: bytes) -> None:
    assert bound(TensorSpec("x", "BYTES", [1]), body).tolist() == [body]
    assert bound(TensorSpec("x", "BYTES", [-1, 1]), body, 4).tolist() == [[body]]


@pytest.mark.parametrize(
    ("datatype", "shape", "batches", "size", "text"),
    [
        ("FP32", [-1, -1], 0, 4, "only one dim can be derived from the number of bytes, the shape is [-1,-1]"),
        ("FP32", [-1, 3], 0, 16, "4 elements do not match the shape [-1,3]"),
        ("FP32", [-1, 0], 0, 0, "0 elements do not match the shape [-1,0]"),
        ("FP32", [2, 3], 0, 20, "input byte size mismatch for input 'x' for model 'm'. Expected 24, got 20"),
        ("FP32", [-1, 3], 8, 24, "input byte size mismatch for input 'x' for model 'm'. Expected 12, got 24"),
        ("BOOL", [-1], 0, 0, ""),
        ("BYTES", [-1], 0, 4, "BYTES requires an input of shape [1], got [-1]"),
        ("BYTES", [1, 1], 0, 4, "BYTES requires an input of shape [1], got [1,1]"),
        ("BYTES", [-1], 8, 4, "BYTES requires an input of shape [1], got []"),
        ("FP32", None, 0, 4, "the input has no fixed rank, so its shape cannot be derived from the body"),
    ],
)
def test_bodies_that_do_not_fit(
    datatype: str, shape: list[int] | None, batches: int, size: int, text: str
) -> None:
    if not text:
        assert bound(TensorSpec("x", datatype, shape), bytes(size), batches).shape == (size,)
        return
    with pytest.raises(InvalidArgument) as caught:
        bound(TensorSpec("x", datatype, shape), bytes(size), batches)
    assert text in caught.value.message


def test_models_that_have_no_input_or_several() -> None:
    specs = [TensorSpec(name, "FP32", [1]) for name in "ab"]
    for signature in (Signature((), ()), Signature(specs, ()), Signature((), (), any_tensors=True)):
        with pytest.raises(
            InvalidArgument, match="a raw binary request requires a model with 1 input, model 'm' has"
        ):
            decode_raw(http(b""), signature)


@given(
    st.sampled_from(sorted(set(DATATYPES) - {"BYTES", "BOOL"})),
    st.lists(st.integers(-1, 4), max_size=4),
    st.binary(max_size=200),
)
def test_any_body_fits_or_is_refused(datatype: str, shape: list[int], body: bytes) -> None:
    try:
        array = bound(TensorSpec("x", datatype, shape), body)
    except InvalidArgument:
        return
    assert len(array.shape) == len(shape)
    assert all(wanted in (-1, dim) for dim, wanted in zip(array.shape, shape, strict=True))
    assert array.tobytes() == body


def test_what_is_raw() -> None:
    assert not is_raw(HttpRequest({"model": "m"}, {}, b""))
    assert not is_raw(HttpRequest({"model": "m"}, {LENGTH.lower(): "2"}, b"{}"))
    with pytest.raises(InvalidArgument, match="inference header size should be in range"):
        is_raw(HttpRequest({"model": "m"}, {LENGTH.lower(): "-1"}, b""))
