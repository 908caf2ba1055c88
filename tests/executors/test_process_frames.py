"""Frames between the server and a process: any frame and any value arrives as it was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot import Signature, TensorSpec
from triglot.core.tensor import DATATYPES, bytes_elements, datatype_of
from triglot.executors.remote.child import InstanceConfig
from triglot.executors.remote.frames import HEAD, Frame, FrameError, FrameReader, Kind, Place, pack
from triglot.executors.remote.values import dumps, loads
from triglot.model.config import Device, InstanceGroup, ModelConfig, TensorConfig
from triglot.model.scheduling import DynamicBatching, QueuePolicy

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


def read(reader: FrameReader, data: bytes) -> list[Frame]:
    """The frames that are complete with this data."""
    reader.feed(data)
    return [*iter(reader.next, None)]


@given(st.lists(FRAMES, max_size=4), st.data())
def test_any_frames_arrive_in_any_pieces(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(pack, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = FrameReader()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [frame for piece in pieces for frame in read(reader, piece)] == frames


@given(FRAMES, st.data())
def test_damaged_frames_are_refused_or_are_other_frames(frame: Frame, data: st.DataObject) -> None:
    raw_frame = bytearray(pack(frame))
    at = data.draw(st.integers(0, len(raw_frame) - 1))
    raw_frame[at] ^= data.draw(st.integers(1, 255))
    with suppress(FrameError):
        assert all(isinstance(frame, Frame) for frame in read(FrameReader(), bytes(raw_frame)))


@pytest.mark.parametrize("lists", [b"{", b"[]", b"[[7],[]]", b"[[[1]],[]]", b"[[],7]", b"\xff", b"[" * 100_000])
def test_lists_that_are_none_are_refused(lists: bytes) -> None:
    with pytest.raises(FrameError, match="no frame"):
        read(FrameReader(), HEAD.pack(len(lists), 0, Kind.CALL, 1, 0, 0, 0) + lists)


def test_impossible_length_is_refused() -> None:
    with pytest.raises(FrameError, match="4294967295 bytes"):
        read(FrameReader(), HEAD.pack(2**32 - 1, 0, Kind.CALL, 1, 0, 0, 0))


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
