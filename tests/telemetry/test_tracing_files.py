"""The files of traces, and tensors as they tell them (spec 3.11)."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.served_models import Gated
from tests.traced_models import Traces, one_model, served
from tests.waiting import until
from triglot.core.tensor import DATATYPES, pack_bytes
from triglot.core.types import InputTensor, OutputTensor
from triglot.telemetry.file_writer import MAX_WAITING
from triglot.telemetry.trace_file import TraceFile
from triglot.telemetry.trace_tensors import MAX_TEXT, of_input, of_output

# --- files ---


async def test_a_file_after_some(tmp_path: Path) -> None:
    async with served(tmp_path / "t", one_model(), trace_log_frequency=2) as client:
        for _ in range(5):
            await client.infer("twice", 1)
        await until((tmp_path / "t.1").exists)
        assert not (tmp_path / "t.2").exists()
    assert [len(Traces(tmp_path / f"t.{number}").heads) for number in range(3)] == [2, 2, 1]
    assert sorted(os.listdir(tmp_path)) == ["t.0", "t.1", "t.2"]  # noqa: PTH208 - quick enough for a loop


async def test_a_change_writes_what_is_collected(tmp_path: Path) -> None:
    file = tmp_path / "t"
    async with served(file, one_model()) as client:
        await client.infer("twice", 1)
        await client.infer("twice", 1)
        assert not file.exists()
        await client.set(trace_rate="1")
        await until(file.exists)
        assert len(Traces(file).heads) == 2
        await client.infer("twice", 1)
        await client.set(trace_level="OFF")
        await client.infer("twice", 1)
    assert [head["id"] for head in Traces(file).heads] == [1, 2, 3]


async def test_a_request_that_ends_after_the_change(tmp_path: Path) -> None:
    model = Gated()
    file = tmp_path / "t"
    async with served(file, {"gated": model}) as client:
        asking = asyncio.create_task(client.infer("gated", 1))
        await model.until_at("infer")
        await client.set(trace_level="OFF")
        model.open_point("infer")
        await asking
        await until(file.exists)
        assert Traces(file).models == ["gated"]


async def test_more_than_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "t"
    async with served(file, one_model(), trace_level="TENSORS") as client:
        for number in range(600):
            await client.infer("twice", number)
    assert [head["id"] for head in Traces(file).heads] == list(range(1, 601))


async def test_the_file_of_an_earlier_server_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "t"
    for count in (3, 1):
        async with served(file, one_model()) as client:
            for _ in range(count):
                await client.infer("twice", 1)
        assert len(Traces(file).heads) == count


async def test_removed_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with served(folder / "t", one_model(), trace_log_frequency=1) as client:
        folder.rmdir()
        for _ in range(3):
            await client.infer("twice", 1)
        await until(lambda: "traces are lost" in caplog.text)
        folder.mkdir()
        await client.infer("twice", 1)
    assert caplog.text.count("traces are lost") == 1
    assert len(Traces(folder / "t.3").heads) == 1


async def test_folder_that_never_existed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"trace_file: expected a file path in an existing folder, got .*/t"):
        async with served(tmp_path / "nowhere" / "t", one_model()):
            raise AssertionError("it has started")


def records(number: int) -> list[dict[str, Any]]:
    return [{"id": number}]


def test_a_disk_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No call waits for it, and its queue is bounded."""
    traces = TraceFile(tmp_path / "t")
    pipe = tmp_path / "t.0.new"
    os.mkfifo(pipe)
    traces.write(0, MAX_WAITING, partial(records, 0), last=True)
    traces.write(1, 1, partial(records, 1), last=True)
    assert caplog.messages == [f"traces are lost: cannot write {tmp_path / 't'}: the disk is too slow"]
    assert json.loads(pipe.read_bytes()) == [{"id": 0}]
    traces.close()
    traces.write(2, 1, partial(records, 2), last=True)
    traces.close()
    assert json.loads((tmp_path / "t.2").read_text()) == [{"id": 2}]
    assert not (tmp_path / "t.1").exists()


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file stays as it was, and is continued when there is room again."""
    file = tmp_path / "t"
    traces = TraceFile(file)
    traces.write(None, 1, partial(records, 0), last=False)
    traces.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, before[1]))
    try:
        traces.write(None, 1, partial(records, 10**20), last=False)
        traces.write(7, 1, lambda: [{"id": number} for number in range(1000)], last=True)
        traces.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.messages == [f"traces are lost: cannot write {file}: the disk is full"]
    traces.write(None, 1, partial(records, 1), last=False)
    traces.close()
    assert json.loads(file.read_text()) == [{"id": 0}, {"id": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_removed_file(tmp_path: Path) -> None:
    traces = TraceFile(tmp_path / "t")
    for number in range(2):
        traces.write(None, 1, partial(records, number), last=False)
    traces.close()
    assert json.loads((tmp_path / "t").read_text()) == [{"id": 0}, {"id": 1}]
    (tmp_path / "t").rename(tmp_path / "away")
    traces.write(None, 1, partial(records, 2), last=False)
    traces.close()
    (tmp_path / "t").write_text("somebody else's")
    traces.write(None, 1, partial(records, 3), last=False)
    traces.close()
    assert json.loads((tmp_path / "t").read_text()) == [{"id": 3}]
    assert json.loads((tmp_path / "away").read_text()) == [{"id": 0}, {"id": 1}]


# --- tensors as text ---


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_both_sides_of_a_datatype(datatype: str) -> None:
    dtype = DATATYPES[datatype].dtype
    array = np.array([[0, 1], [1, 0]]).astype(dtype)
    output = of_output(OutputTensor("t", datatype, array.T)).text()
    given = of_input(InputTensor("t", datatype, (2, 2), array.tobytes())).text()
    assert output == given
    assert (output["shape"], output["dtype"]) == ("2,2", datatype)
    assert np.array([complex(word) for word in output["data"].split(",")]).tolist() == [0, 1, 1, 0]


@given(st.lists(st.binary(max_size=9), max_size=20))
def test_texts(elements: list[bytes]) -> None:
    raw = of_input(InputTensor("t", "BYTES", (len(elements),), pack_bytes(elements))).text()
    array = np.empty(len(elements), object)
    array[:] = elements
    assert raw == of_output(OutputTensor("t", "BYTES", array)).text()
    assert json.loads(f"[{raw['data']}]") == [element.decode(errors="replace") for element in elements]


@given(st.binary(max_size=64))
def test_damaged_texts(data: bytes) -> None:
    text = of_input(InputTensor("t", "BYTES", (1,), data)).text()
    json.loads(f"[{text['data']}]")


def test_long_texts_are_cut() -> None:
    long = b"a" * (2 * MAX_TEXT)
    array = np.array([long, b"b"], object)
    for text in (
        of_input(InputTensor("t", "BYTES", (2,), pack_bytes([long, b"b"]))).text(),
        of_output(OutputTensor("t", "BYTES", array)).text(),
    ):
        assert text["data"].endswith(",...")
        assert len(text["data"]) < MAX_TEXT + 10
