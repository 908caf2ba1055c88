"""What goes between the server and a process: any frame and any tensor arrives as it was."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triglot import Signature, TensorSpec
from triglot.core.model_config import Device, InstanceGroup, ModelConfig, TensorConfig
from triglot.core.scheduling import DynamicBatching, QueuePolicy
from triglot.core.tensor import DATATYPES, bytes_elements, datatype_of
from triglot.engine.processes.arena import Arena, packed
from triglot.engine.processes.channel import Channel, Gone
from triglot.engine.processes.frames import Frame, FrameError, FrameReader, Kind, Place, pack, unpack
from triglot.engine.processes.instance_config import InstanceConfig
from triglot.engine.processes.mirror import Mirror
from triglot.engine.processes.values import dumps, loads
from triglot.engine.processes.views import COPIED, MOST_HELD

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(), max_size=20)
PLACES = st.builds(
    Place, TEXTS, st.sampled_from(list(DATATYPES)), st.lists(UINT64, max_size=5).map(tuple), UINT64, UINT64
)
FRAMES = st.builds(
    Frame,
    st.sampled_from(Kind),
    UINT64,
    st.binary(max_size=50),
    st.none() | st.lists(PLACES, max_size=4).map(tuple),
    UINT32,
    UINT64,
    st.lists(UINT32, max_size=5).map(tuple),
    st.booleans(),
)
DTYPES = [datatype.dtype for datatype in DATATYPES.values() if datatype.itemsize]


def arrays() -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Of every datatype, of any rank, empty ones too, in any layout."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    numeric = st.tuples(st.sampled_from(DTYPES), shapes, st.randoms(use_true_random=False)).map(_numeric)
    texts = hnp.arrays(object, shapes, elements=st.binary(max_size=9) | TEXTS.filter(_is_utf8))
    return (numeric | texts).flatmap(lambda array: st.sampled_from(_layouts(array)))


def _is_utf8(text: str) -> bool:
    with suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False


def _numeric(drawn: tuple[np.dtype[Any], tuple[int, ...], Any]) -> np.ndarray[Any, Any]:
    dtype, shape, random = drawn
    raw = random.randbytes(int(np.prod(shape)) * dtype.itemsize)
    array = np.frombuffer(raw, np.uint8) & 1 if dtype.kind == "b" else np.frombuffer(raw, np.uint8)
    return array.view(dtype).reshape(shape)


def _layouts(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    found = [array, array.T, array[..., ::-1] if array.ndim else array]
    if array.dtype.kind in "iufc":
        found.append(array.astype(array.dtype.newbyteorder(">")))
    return found


def raw(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], Any]:
    """What must be equal: NaNs and their payloads, too."""
    if datatype_of(array) == "BYTES":
        return "BYTES", array.shape, bytes_elements(array)
    little = array.astype(DATATYPES[datatype_of(array)].dtype, copy=False)
    return datatype_of(array), array.shape, little.tobytes()


# --- frames ---


@given(st.lists(FRAMES, max_size=4), st.data())
def test_any_frames_arrive_in_any_pieces(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(pack, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = FrameReader()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@given(FRAMES, st.data())
def test_damaged_frames_are_refused_or_are_other_frames(frame: Frame, data: st.DataObject) -> None:
    raw_frame = bytearray(pack(frame)[4:])
    at = data.draw(st.integers(0, len(raw_frame) - 1))
    raw_frame[at] ^= data.draw(st.integers(1, 255))
    with suppress(FrameError):
        assert isinstance(unpack(raw_frame), Frame)
    with pytest.raises(FrameError):
        unpack(pack(frame)[4:-1])


def test_a_length_that_nobody_sends_is_refused() -> None:
    with pytest.raises(FrameError, match="4294967295 bytes"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


# --- tensors ---


@pytest.fixture(name="ends")
def two_ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@settings(max_examples=200)
@given(st.lists(st.dictionaries(TEXTS, arrays(), max_size=3), min_size=1, max_size=4))
def test_any_tensors_arrive(messages: list[dict[str, np.ndarray[Any, Any]]]) -> None:
    one, other = (Channel(end) for end in socket.socketpair())
    kept = []
    for tensors in messages:
        one.send(Kind.CALL, placed=one.place(tensors))
        kept.append(other.receive().tensors)
        other.send(Kind.GO_ON)
        one.receive()
    for tensors, arrived in zip(messages, kept, strict=True):
        assert arrived is not None
        assert {name: raw(array) for name, array in arrived.items()} == {
            name: raw(array) for name, array in tensors.items()
        }
        assert not any(array.flags.writeable for array in arrived.values())
    one.close()
    other.close()


def echo(ends: tuple[Channel, Channel], value: float, size: int = COPIED) -> np.ndarray[Any, Any]:
    """Send a tensor of more bytes than are copied out, and let the other side say something."""
    ends[0].send(Kind.CALL, placed=ends[0].place({"x": np.full(size, value, np.float32)}))
    tensors = ends[1].receive().tensors
    assert tensors is not None
    return tensors["x"]


def acknowledge(ends: tuple[Channel, Channel]) -> None:
    ends[1].send(Kind.GO_ON)
    ends[0].receive()


def regions(channel: Channel) -> int:
    return len(channel.arena._regions)


def test_a_region_is_written_again_when_nobody_reads_it(ends: tuple[Channel, Channel]) -> None:
    for value in range(20):
        x = echo(ends, value)
        assert x[-1] == value
        del x
        acknowledge(ends)
    assert regions(ends[0]) == 1


def test_what_somebody_still_reads_is_not_written(ends: tuple[Channel, Channel]) -> None:
    kept = []
    for value in range(5):
        kept.append(echo(ends, value)[1:].reshape(-1, 3)[::2])
        acknowledge(ends)
    assert [one[0, 0] for one in kept] == [0, 1, 2, 3, 4]
    assert all((one == value).all() for value, one in enumerate(kept))
    del kept[:]
    acknowledge(ends)
    echo(ends, 6)
    assert regions(ends[0]) == 5


def test_however_many_are_kept_the_regions_are_few(ends: tuple[Channel, Channel]) -> None:
    kept = []
    for value in range(3 * MOST_HELD):
        kept.append(echo(ends, value))
        acknowledge(ends)
    assert all((one == value).all() for value, one in enumerate(kept))
    assert regions(ends[0]) == MOST_HELD + 1
    del kept[:]
    for value in range(3):
        echo(ends, value)
        acknowledge(ends)
    assert regions(ends[0]) == MOST_HELD + 1
    assert sum(not region.busy for region in ends[0].arena._regions.values()) >= MOST_HELD


def test_a_memoryview_keeps_the_region_too(ends: tuple[Channel, Channel]) -> None:
    kept = memoryview(echo(ends, 1).data)
    acknowledge(ends)
    echo(ends, 2)
    assert kept[0] == 1


def test_small_tensors_keep_no_region(ends: tuple[Channel, Channel]) -> None:
    kept = []
    for value in range(50):
        kept.append(echo(ends, value, 10))
        acknowledge(ends)
    assert [one[0] for one in kept] == list(range(50))
    assert regions(ends[0]) == 1


def test_a_larger_tensor_gets_a_larger_region_and_the_memory_is_given_back(ends: tuple[Channel, Channel]) -> None:
    for size in (10, 100_000, 10_000_000):
        assert echo(ends, 3, size).shape == (size,)
        acknowledge(ends)
    arena = ends[0].arena
    arena.trim(0.0)
    assert arena.held > 40_000_000
    arena.trim(float("inf"))
    assert arena.held == 0
    assert echo(ends, 4, 10_000_000)[-1] == 4
    assert regions(ends[0]) == 3


def test_without_memfd_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arena, mirror = Arena(), Mirror()
    placed = arena.place(packed({"x": np.arange(100_000)}))
    assert placed.descriptor is not None
    assert list(tmp_path.iterdir()) == []
    mirror.adopt(placed.region, placed.region_size, placed.descriptor)
    [(_, x)] = mirror.tensors(placed.region, placed.places)
    assert (x == np.arange(100_000)).all()
    arena.release([placed.region])
    arena.trim(float("inf"))
    assert arena.held == 0


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([Place("x", "FP32", (100_000,), 0, 400_000)], "do not lie in a region"),
        ([Place("x", "FP32", (3,), 0, 8)], "has 8 bytes"),
    ],
)
def test_places_that_cannot_be_are_refused(places: list[Place], text: str) -> None:
    arena, mirror = Arena(), Mirror()
    placed = arena.place(packed({"x": np.zeros(10)}))
    assert placed.descriptor is not None
    mirror.adopt(placed.region, placed.region_size, placed.descriptor)
    with pytest.raises(FrameError, match=text):
        mirror.tensors(placed.region, places)
    with pytest.raises(FrameError, match="no region 7"):
        mirror.tensors(7, places)


# --- what goes back as it came ---


def back(ends: tuple[Channel, Channel], **tensors: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What the first end gets when the second sends these."""
    ends[1].send(Kind.DONE, placed=ends[1].place(tensors))
    message = ends[0].receive()
    assert message.tensors is not None
    return message.tensors


def test_what_goes_back_as_it_came_is_not_copied(ends: tuple[Channel, Channel]) -> None:
    x = np.arange(60_000.0).reshape(200, 300)
    ends[0].send(Kind.CALL, placed=ends[0].place({"x": x}))
    came = ends[1].receive().tensors
    assert came is not None
    got = back(ends, same=came["x"], part=came["x"][7:9], none=came["x"][:0])
    del came
    assert (got["same"] == x).all()
    assert (got["part"] == x[7:9]).all()
    assert got["none"].shape == (0, 300)
    assert regions(ends[1]) == 0
    assert not got["same"].flags.writeable
    acknowledge(ends)
    # As long as it is read here, nothing else is written there.
    part = got["part"][0]
    del got
    assert echo(ends, 5.0, 60_000)[-1] == 5.0
    assert (part == x[7]).all()
    assert regions(ends[0]) == 2
    del part
    acknowledge(ends)
    for value in range(5):
        came = {"x": echo(ends, value, 60_000)}
        got = back(ends, **came)
        del came
        assert (got.pop("x") == value).all()
        acknowledge(ends)
    assert regions(ends[0]) == 2
    assert regions(ends[1]) == 0


def test_what_lies_elsewhere_or_otherwise_is_copied(ends: tuple[Channel, Channel]) -> None:
    one, two = echo(ends, 1.0), echo(ends, 2.0)
    for sent in (
        {"one": one, "two": two},
        {"one": one, "new": np.ones(3)},
        {"part": one[::2]},
        {"turned": one.reshape(2, -1).T},
        {"text": np.array([b"a" * 20_000], object), "one": one},
    ):
        got = back(ends, **sent)
        assert {name: raw(array) for name, array in got.items()} == {
            name: raw(array) for name, array in sent.items()
        }
        del got
        acknowledge(ends[::-1])
    assert regions(ends[0]) == 2
    assert regions(ends[1]) == 1
    # As another type it is still the same bytes.
    assert raw(back(ends, one=one.view(np.uint8))["one"]) == raw(one.view(np.uint8))
    assert regions(ends[1]) == 1
    assert not ends[1].arena._regions[1].busy


def test_many_that_went_back_are_copied_out(ends: tuple[Channel, Channel]) -> None:
    kept = []
    for value in range(3 * MOST_HELD):
        kept.append(back(ends, x=echo(ends, value))["x"])
        acknowledge(ends)
    assert all((one == value).all() for value, one in enumerate(kept))
    assert MOST_HELD <= regions(ends[0]) <= MOST_HELD + 2


def test_only_what_is_being_read_goes_back(ends: tuple[Channel, Channel]) -> None:
    frame = Frame(Kind.DONE, places=(Place("x", "FP32", (3,), 0, 12),), region=1, returned=True)
    ends[1].socket.sendall(pack(frame))
    with pytest.raises(Gone, match="region 1 is not read"):
        ends[0].receive()
    echo(ends, 1.0)
    acknowledge(ends)
    ends[1].socket.sendall(pack(frame))
    with pytest.raises(Gone, match="region 1 is not read"):
        ends[0].receive()


def test_what_is_no_frame_ends_the_conversation(ends: tuple[Channel, Channel]) -> None:
    ends[0].socket.sendall(b"\x05\x00\x00\x00hello")
    with pytest.raises(Gone):
        ends[1].receive()


def test_a_dtype_without_a_name_is_refused_and_nothing_is_lost(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="'day': numpy dtype datetime64"):
        ends[0].place({"x": np.zeros(100_000), "day": np.array("2026-01-01", "M8[D]")})
    assert regions(ends[0]) == 0


# --- values ---

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXTS
    | st.binary()
    | st.just(Path("/a")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS, inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(JSON)
def test_any_value_arrives(value: object) -> None:
    assert loads(dumps(value)) == value


@given(arrays())
def test_any_array_arrives_as_a_value(array: np.ndarray[Any, Any]) -> None:
    assert raw(loads(dumps({"!": array}))["!"]) == raw(array)


def test_configurations_and_signatures_arrive() -> None:
    config = ModelConfig(
        "python",
        inputs=(TensorConfig("x", "FP32", (1, -1), Path("labels")),),
        instance_groups=(InstanceGroup("GPU", 2, (0, 1)),),
        dynamic_batching=DynamicBatching(policies={2: QueuePolicy(timeout=1.0)}, max_queue_delay=0.01),
        parameters={"a": "ü"},
    )
    arrived = loads(dumps(config))
    assert type(arrived) is ModelConfig
    assert arrived.dynamic_batching == config.dynamic_batching
    assert arrived.inputs[0].label_file == Path("labels")
    signature = Signature(
        [TensorSpec("x", "BF16", [-1])], [], defaults={"x": np.array([1.5], ml_dtypes.bfloat16)}, max_batch_size=3
    )
    again = loads(dumps({"sig": signature}))["sig"]
    assert (again.inputs[0], again.max_batch_size) == (signature.inputs[0], 3)
    assert again.defaults["x"] == signature.defaults["x"]


def test_other_objects_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="a value of Path2"):
        dumps({"x": [type("Path2", (), {})()]})


@pytest.mark.parametrize("instance", [0, 1, 2, 3])
def test_a_process_has_its_own_device(instance: int) -> None:
    config = ModelConfig(instance_groups=[InstanceGroup("GPU", 1), InstanceGroup("CPU", 2)], execution="process")
    own = InstanceConfig.of(config, instance)
    assert own.execution == "thread"
    assert own.devices(lambda: 2) == [config.devices(lambda: 2)[instance]]
    assert own.count == 4
    assert InstanceConfig.of(ModelConfig(), 1).devices(lambda: 2) == []


def test_devices_as_texts() -> None:
    assert str(Device("GPU", 1)) == "GPU 1"
