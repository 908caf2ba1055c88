"""Tensors in shared memory: any arrives as it was, and no region is written while it is read."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.executors.test_process_frames import TEXTS, arrays, raw
from triglot.executors.joining import join
from triglot.executors.remote.channel import Channel, PeerClosed
from triglot.executors.remote.frames import HEAD, FrameError, Kind, Place
from triglot.executors.remote.shared_memory import COPIED, MAX_HELD, Arena, Mirror, packed


@pytest.fixture(name="ends")
def two_ends() -> Iterator[tuple[Channel, Channel]]:
    local, other = (Channel(end) for end in socket.socketpair())
    yield local, other
    local.close()
    other.close()


def pair(*, shares_memory: bool) -> tuple[Channel, Channel]:
    """Both ends of a channel, on one machine or between two."""
    local, other = (Channel(end, shares_memory=shares_memory) for end in socket.socketpair())
    return local, other


@pytest.mark.parametrize("shares_memory", [True, False])
@given(messages=st.lists(st.dictionaries(TEXTS, arrays(), max_size=3), min_size=1, max_size=4))
def test_any_tensors_arrive(messages: list[dict[str, np.ndarray[Any, Any]]], shares_memory: bool) -> None:
    local, other = pair(shares_memory=shares_memory)
    kept = []
    for tensors in messages:
        local.send(Kind.CALL, placed=local.place(tensors))
        kept.append(other.receive().tensors)
        other.send(Kind.GO_ON)
        local.receive()
    for tensors, arrived in zip(messages, kept, strict=True):
        assert arrived is not None
        assert {name: raw(array) for name, array in arrived.items()} == {
            name: raw(array) for name, array in tensors.items()
        }
        assert not any(array.flags.writeable for array in arrived.values())
    local.close()
    other.close()


@pytest.mark.parametrize("shares_memory", [True, False])
@given(
    array=arrays().filter(lambda array: array.ndim > 0 and len(array) > 0),
    count=st.integers(1, 3),
    padding=st.integers(0, 2),
)
def test_what_is_joined_on_its_way_arrives_as_if_it_had_been_before(
    array: np.ndarray[Any, Any], count: int, padding: int, shares_memory: bool
) -> None:
    members = [{"x": array[: at + 1]} for at in range(count)]
    rows = sum(len(member["x"]) for member in members) + padding
    local, other = pair(shares_memory=shares_memory)
    local.send(Kind.CALL, placed=local.place(join(members, rows, hosted=True)))
    arrived = other.receive().tensors
    assert arrived is not None
    assert raw(arrived["x"]) == raw(join(members, rows, hosted=False)["x"])
    local.close()
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


def held(arena: Arena) -> int:
    """Bytes of the regions that have not returned their memory."""
    return sum(region.size for region in arena._regions.values() if not region.empty)


def regions(channel: Channel) -> int:
    return len(channel.arena._regions)


def test_region_is_reused_when_unread(ends: tuple[Channel, Channel]) -> None:
    for value in range(20):
        x = echo(ends, value)
        assert x[-1] == value
        del x
        acknowledge(ends)
    assert regions(ends[0]) == 1


def test_region_in_use_is_not_written(ends: tuple[Channel, Channel]) -> None:
    kept = []
    for value in range(5):
        kept.append(echo(ends, value)[1:].reshape(-1, 3)[::2])
        acknowledge(ends)
    assert [tensor[0, 0] for tensor in kept] == [0, 1, 2, 3, 4]
    assert all((tensor == value).all() for value, tensor in enumerate(kept))
    del kept[:]
    acknowledge(ends)
    echo(ends, 6)
    assert regions(ends[0]) == 5


def test_however_many_are_kept_the_regions_are_few(ends: tuple[Channel, Channel]) -> None:
    kept = []
    for value in range(3 * MAX_HELD):
        kept.append(echo(ends, value))
        acknowledge(ends)
    assert all((tensor == value).all() for value, tensor in enumerate(kept))
    assert regions(ends[0]) == MAX_HELD + 1
    del kept[:]
    for value in range(3):
        echo(ends, value)
        acknowledge(ends)
    assert regions(ends[0]) == MAX_HELD + 1
    assert sum(not region.busy for region in ends[0].arena._regions.values()) >= MAX_HELD


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
    assert [tensor[0] for tensor in kept] == list(range(50))
    assert regions(ends[0]) == 1


def test_a_larger_tensor_gets_a_larger_region_and_the_memory_is_given_back(ends: tuple[Channel, Channel]) -> None:
    for size in (10, 100_000, 10_000_000):
        assert echo(ends, 3, size).shape == (size,)
        acknowledge(ends)
    arena = ends[0].arena
    arena.trim(0.0)
    assert held(arena) > 40_000_000
    arena.trim(float("inf"))
    assert held(arena) == 0
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
    assert placed.places is not None
    [(_, x)] = mirror.tensors(placed.region, placed.places)
    assert (x == np.arange(100_000)).all()
    arena.release([placed.region])
    arena.trim(float("inf"))
    assert held(arena) == 0


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([Place("x", "FP32", (100_000,), 0, 400_000)], "do not fit into a region"),
        ([Place("x", "FP32", (3,), 0, 8)], "has 8 bytes"),
        ([Place("x", "BYTES", (1,), 0, 8)], "tensor 'x' of shape"),
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


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize(
    "data", [b"\xff" * HEAD.size, bytes(HEAD.size), HEAD.pack(5, 0, 1, 1, 0, 0, 0) + b"hello"]
)
def test_invalid_frame_ends_the_connection(data: bytes, shares_memory: bool) -> None:
    local, other = pair(shares_memory=shares_memory)
    local.socket.sendall(data)
    with pytest.raises(PeerClosed):
        other.receive()
    local.close()
    other.close()


def test_a_dtype_without_a_name_is_refused_and_nothing_is_lost(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="'day': numpy dtype datetime64"):
        ends[0].place({"x": np.zeros(100_000), "day": np.array("2026-01-01", "M8[D]")})
    assert regions(ends[0]) == 0
