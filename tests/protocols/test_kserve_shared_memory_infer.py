"""Inference with inputs and outputs in shared memory, over gRPC, streams and REST (spec 2.3, 2.6)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import pytest_asyncio

from tests.process import PLAIN_MODELS
from tests.protocols.kserve_served import MODELS, Served, serve_models
from tests.protocols.tensor_places import (
    INTERFACES,
    PREFIX,
    In,
    Memory,
    Outcome,
    ask,
    memory,
    message_of,
    register,
    stream,
    unregister,
)
from triglot.core.errors import Code
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, object_array, pack_bytes
from triglot.core.types import OutputOptions, RegionSlice

pytestmark = pytest.mark.asyncio(loop_scope="module")
EVERY = pytest.mark.parametrize("interface", INTERFACES)
SIZE = 16 * 2**20
HALF = SIZE // 2
LIMIT = SIZE - 1
PAIR = np.array([[1, 2]], "f4")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    paths = (MODELS, *sorted(PLAIN_MODELS.glob("identity_*")))
    async with serve_models(paths, shared_memory_prefix=PREFIX, max_message_size=LIMIT) as opened:
        yield opened


@pytest.fixture(scope="module")
def made() -> Iterator[Memory]:
    with memory(SIZE) as region:
        yield region


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def region(served: Served, made: Memory) -> AsyncIterator[None]:
    """The whole object as "all", its second half as "half", all zeros."""
    made.path.write_bytes(b"")
    made.cut(SIZE)
    for name, size, offset in (("all", SIZE, 0), ("half", HALF, HALF)):
        assert await register(served, name, made, size, offset) == (Code.OK, "")
    yield
    assert await unregister(served) == (Code.OK, "")


def into(size: int, offset: int = 0, region: str = "all") -> OutputOptions:
    return OutputOptions(region=RegionSlice(region, offset, size))


def expected(interface: str, code: Code, text: str) -> Outcome:
    """In a stream, an error is a message, without a code."""
    return Outcome(Code.UNKNOWN if interface == "stream" else code, text)


def x(place: RegionSlice, *shape: int, datatype: str = "FP32") -> list[In]:
    return [In("x", place, datatype, shape)]


@EVERY
async def test_in_and_out(interface: str, served: Served, made: Memory) -> None:
    made.put(PAIR, HALF + 4)
    outcome = await ask(
        served, interface, "identity_fp32", x(RegionSlice("half", 4, 8), 1, 2), {"y": into(12, 100)}
    )
    assert outcome == Outcome(Code.OK, "", {"y": ("FP32", [1, 2], b"")})
    assert made.array("f4", 4, 96).tolist() == [0, 1, 2, 0]


@EVERY
async def test_regions_with_raw_tensors(interface: str, served: Served, made: Memory) -> None:
    made.put(np.array([10, 20], "i4"))
    a, b = RegionSlice("all", 0, 8), np.array([1, 2], "i4")
    outputs = {"sum": None, "difference": into(8, 64)}
    outcome = await ask(served, interface, "two_inputs", [In("a", a, "INT32", [2]), In("b", b)], outputs)
    assert outcome.outputs == {
        "sum": ("INT32", [2], np.array([11, 22], "i4").tobytes()),
        "difference": ("INT32", [2], b""),
    }
    assert made.array("i4", 2, 64).tolist() == [9, 18]
    outcome = await ask(served, interface, "two_inputs", [In("b", b), In("a", a, "INT32", [2])])
    assert outcome.raw("difference") == np.array([9, 18], "i4").tobytes()
    outcome = await ask(served, interface, "two_inputs", [In("a", b), In("b", b)], {"sum": into(8)})
    assert outcome.outputs == {"sum": ("INT32", [2], b"")}


@EVERY
@pytest.mark.parametrize("datatype", sorted(set(DATATYPES) - {"BYTES", *TFSERVING_DATATYPES}))
async def test_every_datatype(interface: str, datatype: str, served: Served, made: Memory) -> None:
    size = 3 * DATATYPES[datatype].itemsize
    raw = bytes(at % 2 for at in range(size))
    made.put(raw, 1)  # As unaligned as a client likes.
    place = RegionSlice("all", 1, size)
    outcome = await ask(
        served,
        interface,
        f"identity_{datatype.lower()}",
        x(place, 3, 1, datatype=datatype),
        {"y": into(size, 201)},
    )
    assert outcome.outputs == {"y": (datatype, [3, 1], b"")}
    assert made.get(size + 2, 200) == b"\0" + raw + b"\0"


@EVERY
async def test_text(interface: str, served: Served, made: Memory) -> None:
    raw = pack_bytes([b"", b"\xff\0", b"text"])
    made.put(raw, 8)
    place = RegionSlice("all", 8, len(raw))
    inputs = x(place, 3, 1, datatype="BYTES")
    outcome = await ask(served, interface, "identity_bytes", inputs, {"y": into(100, HALF)})
    assert outcome.outputs == {"y": ("BYTES", [3, 1], b"")}
    assert made.get(100, HALF) == raw.ljust(100, b"\0")
    assert (await ask(served, interface, "identity_bytes", inputs)).raw() == raw
    # One that has more room than elements.
    outcome = await ask(
        served, interface, "identity_bytes", x(RegionSlice("all", 8, len(raw) + 1), 3, 1, datatype="BYTES")
    )
    assert outcome.code is not Code.OK
    assert "for inference input 'x' for model 'identity_bytes'" in outcome.text


@EVERY
async def test_no_elements(interface: str, served: Served) -> None:
    outcome = await ask(
        served, interface, "identity_fp32", x(RegionSlice("all", 5, 0), 0, 3), {"y": into(0, SIZE - 1)}
    )
    assert outcome.outputs == {"y": ("FP32", [0, 3], b"")}


@EVERY
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
async def test_large_tensors(interface: str, datatype: str, served: Served, made: Memory) -> None:
    """Again and again: memory is used for several requests."""
    shape = [1, 2**18] if datatype == "FP32" else [1, 1]
    for at in range(3):
        raw = np.full(2**18, at + 1, "f4").tobytes()
        raw = raw if datatype == "FP32" else pack_bytes([raw])
        made.put(raw)
        inputs = x(RegionSlice("all", 0, len(raw)), *shape, datatype=datatype)
        model = f"identity_{datatype.lower()}"
        assert (await ask(served, interface, model, inputs, {"y": into(HALF, region="half")})).raw() == b""
        assert made.get(len(raw), HALF) == raw
        if interface != "stream":
            continue
        assert (await ask(served, interface, model, inputs)).raw() == raw


@EVERY
async def test_a_scalar(interface: str, served: Served, made: Memory) -> None:
    made.put(np.array(2, "f8"))
    inputs = x(RegionSlice("all", 0, 8), datatype="FP64")
    assert (await ask(served, interface, "scalar", inputs, {"y": into(8, 8)})).outputs == {"y": ("FP64", [], b"")}
    assert made.array("f8", 2).tolist() == [2, 3]


@EVERY
@pytest.mark.parametrize(
    ("place", "code", "text"),
    [
        (RegionSlice("none", 0, 8), Code.NOT_FOUND, "Unable to find shared memory region: 'none'"),
        (
            RegionSlice("half", HALF, 0),
            Code.INVALID_ARGUMENT,
            f"Invalid offset for shared memory region: 'half': it has {HALF} bytes, got offset {HALF}",
        ),
        (
            RegionSlice("half", HALF - 7, 8),
            Code.INVALID_ARGUMENT,
            f"Invalid offset + byte size for shared memory region: 'half': it has {HALF} bytes, got 8 at offset "
            f"{HALF - 7}",
        ),
        (
            RegionSlice("all", 2**63 - 1, 2**63 - 1),
            Code.INVALID_ARGUMENT,
            f"Invalid offset for shared memory region: 'all': it has {SIZE} bytes, got offset {2**63 - 1}",
        ),
        (
            RegionSlice("all", 8, 2**63 - 1),
            Code.INVALID_ARGUMENT,
            f"Invalid offset + byte size for shared memory region: 'all': it has {SIZE} bytes, got {2**63 - 1} at "
            "offset 8",
        ),
    ],
)
async def test_missing_places(interface: str, place: RegionSlice, code: Code, text: str, served: Served) -> None:
    assert await ask(served, interface, "identity_fp32", x(place, 1, 2)) == expected(interface, code, text)
    outcome = await ask(served, interface, "identity_fp32", [In("x", PAIR)], {"y": OutputOptions(region=place)})
    assert outcome == expected(interface, code, text)


async def test_a_place_whose_end_no_number_can_say(served: Served) -> None:
    """In Triton's words. Only JSON knows such numbers."""
    outcome = await ask(served, "rest", "identity_fp32", x(RegionSlice("all", 32, 2**64 - 32), 1, 2))
    assert outcome.code is Code.INVALID_ARGUMENT
    assert outcome.text == (
        f"Integer overflow detected: byte_size ({2**64 - 32}) + offset (32) exceeds maximum value ({2**64 - 1}) "
        "for region 'all'"
    )


@EVERY
async def test_an_output_that_is_larger_than_its_place(interface: str, served: Served, made: Memory) -> None:
    inputs = [In("a", np.array([1], "i4")), In("b", np.array([2], "i4"))]
    outcome = await ask(served, interface, "two_inputs", inputs, {"sum": into(4, 64), "difference": into(3)})
    text = (
        "shared memory size specified with the request for output 'difference' (3 bytes) should be at least 4 "
        "bytes to hold the results"
    )
    assert outcome == expected(interface, Code.INTERNAL, text)
    assert made.get(100) == bytes(100)


@EVERY
async def test_an_input_of_another_size_than_its_shape_says(interface: str, served: Served) -> None:
    outcome = await ask(served, interface, "identity_fp32", x(RegionSlice("all", 0, 9), 1, 2))
    text = "input byte size mismatch for input 'x' for model 'identity_fp32'. Expected 8, got 9"
    assert outcome == expected(interface, Code.INVALID_ARGUMENT, f"[request id: <id_unknown>] {text}")


@EVERY
@pytest.mark.parametrize(("shape", "size"), [((1, 2), 2), ((1, 2), 9), ((1, 2), HALF), ((2, -1), HALF)])
async def test_what_cannot_fit_is_not_read(
    interface: str, served: Served, made: Memory, shape: tuple[int, ...], size: int
) -> None:
    """There is nothing left to read."""
    made.cut(0)
    outcome = await ask(served, interface, "identity_fp32", x(RegionSlice("all", 0, size), *shape))
    what = f"Expected 8, got {size}" if min(shape) > 0 else "got [2,-1]"
    assert what in outcome.text.replace("[2, -1]", "[2,-1]")


@EVERY
async def test_inputs_are_together_as_large_as_a_request_may_be(interface: str, served: Served) -> None:
    place = RegionSlice("all", 0, SIZE)
    tensors = [In(name, place, "INT32", [SIZE // 4]) for name in "ab"]
    for inputs, size in ((tensors[:1], SIZE), (tensors, 2 * SIZE)):
        text = (
            f"the request's inputs in shared memory have {size} bytes, the limit is {LIMIT}; see the server's "
            "option max_message_size"
        )
        outcome = await ask(served, interface, "two_inputs", inputs)
        assert outcome == expected(interface, Code.RESOURCE_EXHAUSTED, text)


@EVERY
async def test_bytes_that_are_no_truth_values(interface: str, served: Served, made: Memory) -> None:
    made.put(b"\2")
    outcome = await ask(served, interface, "identity_bool", x(RegionSlice("all", 0, 1), 1, 1, datatype="BOOL"))
    assert outcome.text.endswith("is BOOL: its bytes must be 0 or 1")


@EVERY
async def test_an_unknown_model(interface: str, served: Served) -> None:
    outcome = await ask(served, interface, "none", x(RegionSlice("all", 0, 8), 1, 2))
    assert outcome == expected(interface, Code.NOT_FOUND, "Request for unknown model: 'none' is not found")


async def test_a_stream_of_answers_writes_each_into_the_region(served: Served, made: Memory) -> None:
    text = object_array([b"one two three"], (1,))
    messages = [
        message_of("words", [In("text", pack_bytes([text[0]]), "BYTES", [1])], {"word": into(32)}, "7"),
    ]
    answers = await stream(served, messages)
    assert answers == [Outcome(Code.OK, "", {"word": ("BYTES", [1], b"")})] * 3
    assert made.get(9) == pack_bytes([b"three"])
    # The second word has no room, so it is the last.
    messages[0].outputs[0].parameters["shared_memory_byte_size"].int64_param = 7
    messages[0].raw_input_contents[0] = pack_bytes([b"abc wxyz abc"])
    first, second = await stream(served, messages)
    assert first.code is Code.OK
    assert second.text.startswith("shared memory size specified with the request for output 'word' (7 bytes)")
    assert made.get(7) == pack_bytes([b"abc"])


async def test_a_stream_keeps_its_order(served: Served, made: Memory) -> None:
    """Large ones are read elsewhere, and block no other call for ever."""
    made.put(np.full(2**20, 7, "f4"))
    large = x(RegionSlice("all", 0, 2**22), 1, 2**20)
    small = [In("x", PAIR)]
    messages = [message_of("identity_fp32", tensor, {"y": None}) for tensor in (large, small) * 4]
    sizes = [len(outcome.raw()) for outcome in await stream(served, messages)]
    assert sizes == [2**22, 8] * 4
