"""Every error that a client can make and every way a model can fail, over gRPC and REST (spec 1.5, 3.6)."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.protocol_clients.kserve_async import Answer, GrpcClient, Infer, RestClient, Tensor
from tests.protocols.kserve_served import Served, serve_models
from triglot.core.errors import Code
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, pack_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")
Client = GrpcClient | RestClient
ONE = struct.pack("<f", 1.0)
I7 = struct.pack("<i", 7)
A, B = Tensor("a", "INT32", [1], I7), Tensor("b", "INT32", [1], I7)
ROWS, FACTOR = Tensor("rows", "FP32", [1, 3], ONE * 3), Tensor("factor", "FP32", [1], ONE)
PLEASE = "Please provide all required input(s)."
INVALID, MISSING, LATER, NEVER = Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNAVAILABLE, Code.UNIMPLEMENTED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_models() as opened:
        yield opened


@pytest.fixture(params=["grpc", "rest"])
def client(request: pytest.FixtureRequest, served: Served) -> Client:
    return served.client(request.param)


def how(what: str, model: str = "misbehaving", **more: Any) -> Infer:
    return Infer(model, [Tensor("how", "BYTES", [1], pack_bytes([what.encode()]))], **more)


async def assert_that_all_is_well(client: Client) -> None:
    answer = await client.infer(Infer("two_inputs", [A, B], id="7"))
    assert answer == Answer(
        Code.OK,
        "",
        "two_inputs",
        "1",
        "7",
        [Tensor("sum", "INT32", [1], struct.pack("<i", 14)), Tensor("difference", "INT32", [1], bytes(4))],
    )


def infer_of(model: str, tensor: Tensor, **more: Any) -> Infer:
    return Infer(model, [tensor], **more)


FP32 = "identity_fp32"


@pytest.mark.parametrize(("request_id", "shown"), [("", "<id_unknown>"), ("7é", "7é")])
async def test_requests_that_do_not_fit(client: Client, request_id: str, shown: str) -> None:
    """The request's id comes first; the validator's tests have what does not fit."""
    answer = await client.infer(Infer("two_inputs", [A, A], id=request_id))
    assert answer == Answer(INVALID, f"[request id: {shown}] input 'a' already exists in request")
    await assert_that_all_is_well(client)


@pytest.mark.parametrize("shape", [[0, 2**62, 4], [0, 2**63 - 1, 1], [2**62, 4, 1]])
async def test_dims_that_no_array_can_have(client: Client, shape: list[int]) -> None:
    answer = await client.infer(infer_of("any_rank", Tensor("x", "FP32", shape)))
    assert answer.code is INVALID
    assert "too many elements" in answer.text
    await assert_that_all_is_well(client)


UNKNOWN = "Request for unknown model:"


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (Infer("nothing", []), MISSING, f"{UNKNOWN} 'nothing' is not found"),
        (Infer("nothing", [], version="1"), MISSING, f"{UNKNOWN} 'nothing' is not found"),
        (Infer("versions", [], version="3"), MISSING, f"{UNKNOWN} 'versions' version 3 is not found"),
        (
            Infer("versions", [], version="00"),
            INVALID,
            "failed to get model version from specified version string '00' for model 'versions': "
            "expected a positive integer",
        ),
        (
            Infer("words", [Tensor("text", "BYTES", [1], pack_bytes([b"a b"]))]),
            NEVER,
            "{client} doesn't support models with decoupled transaction policy",
        ),
        (
            Infer("two_inputs", [A, B], parameters={"triton_x": 1}),
            INVALID,
            "parameter 'triton_x': names that begin with 'triton_' are reserved",
        ),
        (
            Infer("two_inputs", [A, B], parameters={"sequence_start": 1}),
            INVALID,
            "parameter 'sequence_start': expected bool_param (JSON: true or false), got 1",
        ),
    ],
    ids=lambda value: value.model if isinstance(value, Infer) else "",
)
async def test_other_requests_that_are_refused(client: Client, request_: Infer, code: Code, text: str) -> None:
    assert await client.infer(request_) == Answer(code, text.format(client=client.name))
    await assert_that_all_is_well(client)


async def test_versions(client: Client) -> None:
    for version, number in (("", 10), ("1", 1), ("2", 2), ("10", 10)):
        answer = await client.infer(Infer("versions", [Tensor("x", "INT32", [1], I7)], version=version))
        assert (answer.code, answer.model, answer.version) == (Code.OK, "versions", str(number))
        assert answer.outputs[0].raw == struct.pack("<q", number)


@pytest.mark.parametrize("model", ["misbehaving", "misbehaving_async"])
@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("invalid argument", INVALID, "how must be 'not at all'"),
        ("wrong shape", Code.INTERNAL, "returned output 'y' with shape [3], its signature says [2]"),
    ],
)
async def test_what_a_model_answers_wrongly(client: Client, model: str, what: str, code: Code, text: str) -> None:
    answer = await client.infer(how(what, model, id="7"))
    assert (answer.code, answer.text.removeprefix(f"model '{model}' ")) == (code, text)
    assert (await client.infer(how("not at all", model))).code is Code.OK


@pytest.mark.parametrize(
    ("what", "code", "text"), [("not found", MISSING, "nothing is found"), ("unavailable", LATER, "not now")]
)
async def test_what_a_model_raises(client: Client, what: str, code: Code, text: str) -> None:
    assert await client.infer(how(what, id="7")) == Answer(code, text)


@pytest.mark.parametrize("model", ["misbehaving", "misbehaving_async"])
@pytest.mark.parametrize("what", ["value error", "exit", "cancelled"])
async def test_a_failure_of_the_models_own_stays_its_secret(client: Client, model: str, what: str) -> None:
    answer = await client.infer(how(what, model))
    assert answer.code is Code.INTERNAL
    for secret in ("secret", "ValueError", "Exit", "Traceback", ".py"):
        assert secret not in answer.text
    assert answer.text
    assert (await client.infer(how("not at all", model))).code is Code.OK


async def test_a_datatype_without_a_name(client: Client) -> None:
    answer = await client.infer(how("no datatype"))
    assert answer.code is Code.INTERNAL
    assert answer.text.startswith(
        "model 'misbehaving' returned output 'y': numpy dtype datetime64[s] has no datatype"
    )


async def test_a_text_that_is_too_long(client: Client) -> None:
    for _ in range(20):  # Beyond its soft limit a client refuses by chance.
        answer = await client.infer(how("long text"))
        assert answer.code is INVALID, answer.text
        assert set(answer.text) == {"é"}
    await assert_that_all_is_well(client)


async def test_a_text_that_is_not_unicode(client: Client) -> None:
    answer = await client.infer(how("lone surrogate"))
    assert answer.code is INVALID
    assert answer.text.startswith("no text: ")
    await assert_that_all_is_well(client)


# There are no complex ones: KServe has no name for them.
@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in TFSERVING_DATATYPES])
@pytest.mark.parametrize("shape", [[2, 3], [0, 3], [1, 1]])
async def test_every_datatype_round_trip(client: Client, datatype: str, shape: list[int]) -> None:
    count = shape[0] * shape[1]
    raw = pack_bytes([b"\xff\0", b"", b"a", b"bc", b"d", b"e"][:count])
    if DATATYPES[datatype].itemsize:
        raw = (np.arange(count) % 2).astype(DATATYPES[datatype].dtype).tobytes()
    answer = await client.infer(infer_of(f"identity_{datatype.lower()}", Tensor("x", datatype, shape, raw)))
    assert answer.outputs == [Tensor("y", datatype, shape, raw)], answer


@pytest.mark.parametrize("mebibytes", [1, 16])
async def test_large_tensors(client: Client, mebibytes: int) -> None:
    raw = np.random.default_rng(7).random(mebibytes * 2**18, "f4").tobytes()
    tensor = Tensor("x", "FP32", [1, mebibytes * 2**18], raw)
    answer = await client.infer(infer_of(FP32, tensor))
    assert answer.outputs[0].raw == raw


async def test_scalars_and_other_layouts(client: Client) -> None:
    answer = await client.infer(infer_of("scalar", Tensor("x", "FP64", [], struct.pack("<d", 1.5))))
    assert answer.outputs == [Tensor("y", "FP64", [], struct.pack("<d", 2.5))]
    raw = np.arange(6, dtype="f4")
    answer = await client.infer(infer_of("any_rank", Tensor("x", "FP32", [1, 2, 3], raw.tobytes())))
    assert answer.outputs == [Tensor("turned", "FP32", [3, 2, 1], raw.reshape(1, 2, 3).T.tobytes())]
    answer = await client.infer(how("big endian"))
    assert answer.outputs == [Tensor("y", "FP32", [2], struct.pack("<2f", 1, 2))]


async def test_batches(client: Client) -> None:
    rows = Tensor("rows", "FP32", [4, 3], ONE * 12)
    factor = Tensor("factor", "FP32", [4], struct.pack("<4f", 1, 2, 3, 4))
    answer = await client.infer(Infer("batching", [factor, rows]))
    assert answer.outputs[0].shape == [4, 3]
    assert np.frombuffer(answer.outputs[0].raw, "<f4").reshape(4, 3)[:, 0].tolist() == [1, 2, 3, 4]


async def test_only_the_requested_outputs(client: Client) -> None:
    for outputs in (["difference"], ["sum"], ["difference", "sum"]):
        answer = await client.infer(Infer("two_inputs", [B, A], outputs))
        assert sorted(output.name for output in answer.outputs) == sorted(outputs)
