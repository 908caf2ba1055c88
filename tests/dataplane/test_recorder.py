"""What a record keeps of a request, and what becomes of it when the disk is slow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.served_models import Arrays, Function, Served, serving
from tests.waiting import until
from triglot import Call
from triglot.core.operation import EVERYTHING
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor
from triglot.model.config import Recording
from triglot.protocols.tfserving.recorder import MAX_WAITING_BYTES, Record, Recorder
from triglot.scheduling.servable import Servable


class Recorded:
    """A recorder that records everything, and what it has encoded. `go_on`: the thread that writes may."""

    def __init__(self, folder: Path) -> None:
        self.encoded: list[bytes] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.prefix = str(folder / "r")
        self.recorder = Recorder(Recording(self.prefix, 1.0), encode=self._encode)

    def _encode(self, record: Record) -> bytes:
        self.go_on.wait()
        (tensor,) = record.request.inputs
        self.encoded.append(bytes(tensor.data))
        return b"record"

    @property
    def count(self) -> dict[str, int]:
        (counter,) = self.recorder.counters()
        return {labels[1]: int(count) for labels, count in counter.values}


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    found = Recorded(tmp_path)
    yield found
    found.go_on.set()


def echo(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"]}


def call_of(size: int, *, borrows: bool = False) -> Call:
    call = Call()
    call.size, call.borrows = size, borrows
    return call


def request_of(data: bytearray | bytes) -> InferenceRequest:
    return InferenceRequest("m", inputs=[InputTensor("x", "INT32", (len(data) // 4,), memoryview(data))])


def response_of(array: object) -> InferenceResponse:
    return InferenceResponse("m", "1", "", [OutputTensor("y", "INT32", np.asarray(array))])


def servable_of(served: Served) -> Servable:
    return served.server.dataplane.servable(EVERYTHING, "m")


@pytest.mark.parametrize(("borrows", "kept"), [(True, b"sent"), (False, b"gone")])
async def test_borrowed_memory_is_copied(recorded: Recorded, borrows: bool, kept: bytes) -> None:
    """Other memory is not: a request's own buffer is never changed."""
    memory = bytearray(b"sent")
    async with serving({"m": Function(echo)}) as served:
        request = request_of(memory)
        record = recorded.recorder.record(servable_of(served), request, call_of(4, borrows=borrows))
        assert record is not None
        memory[:] = b"gone"
        record.on_end(response_of([1]))
        await asyncio.to_thread(recorded.recorder.close)
    assert recorded.encoded == [kept]


async def test_outputs_are_copied(recorded: Recorded) -> None:
    array = np.array([1, 2], np.int32)
    async with serving({"m": Function(echo)}) as served:
        record = recorded.recorder.record(servable_of(served), request_of(b"sent"), call_of(4))
        assert record is not None
        record.on_end(response_of(array))
        array[:] = 7
        assert record.outputs[0].array.tolist() == [1, 2]
        await asyncio.to_thread(recorded.recorder.close)


async def test_what_waits_for_a_slow_disk_is_bounded(recorded: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    """Later records are dropped and counted, and said once; so is what is larger than all that may wait."""
    quarter = MAX_WAITING_BYTES // 4
    async with serving({"m": Function(echo)}) as served:

        def record(size: int) -> None:
            recording = recorded.recorder.record(servable_of(served), request_of(b"sent"), call_of(size))
            assert recording is not None
            recording.on_end(response_of(np.empty(0, np.int32)))

        recorded.go_on.clear()
        for _ in range(7):
            record(quarter)
        assert recorded.count == {"dropped": 3}
        recorded.go_on.set()
        await until(lambda: recorded.count == {"dropped": 3, "written": 4})
        record(MAX_WAITING_BYTES + 1)
        assert recorded.count == {"dropped": 4, "written": 4}
        await asyncio.to_thread(recorded.recorder.close)
    prefix = recorded.prefix
    assert [text for text in caplog.messages if "are lost" in text] == [
        f"request records are lost: cannot write {prefix}: the disk is too slow",
        f"request records are lost: cannot write {prefix}: a request and its answer have {MAX_WAITING_BYTES + 1} "
        f"bytes, more than {MAX_WAITING_BYTES}",
    ]


async def test_texts_count_by_their_length(recorded: Recorded) -> None:
    texts = np.array([b"x" * 1000, "y" * 2000], object)
    async with serving({"m": Function(echo)}) as served:
        record = recorded.recorder.record(servable_of(served), request_of(b"sent"), call_of(4))
        assert record is not None
        record.on_end(InferenceResponse("m", "1", "", [OutputTensor("y", "BYTES", texts)]))
        assert 3004 <= record.size <= 3500
        await asyncio.to_thread(recorded.recorder.close)


@pytest.mark.parametrize("rate", [0.0, None])
async def test_models_are_recorded_as_configured_last(tmp_path: Path, rate: float | None) -> None:
    recording = None if rate is None else Recording(str(tmp_path / "r"), rate)
    recorder = Recorder(recording, encode=lambda _: b"")
    async with serving({"m": Function(echo)}) as served:

        def is_recorded() -> bool:
            return recorder.record(servable_of(served), request_of(b"sent"), call_of(4)) is not None

        seen = [is_recorded()]
        for own in ({"m": Recording(str(tmp_path / "r"), 1.0)}, {}):
            recorder.configure(own)
            seen.append(is_recorded())
    assert seen == [False, True, False]
    recorder.close()
