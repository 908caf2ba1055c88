"""What is said of a Python model that its author seems to have meant otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.served_models import Served
from triglot import backends, testing
from triglot.core.errors import ModelLoadError

HEAD = """
import triglot

X = triglot.TensorSpec("x", "FP32", [-1])

"""
MODEL = (
    HEAD
    + """class Mine(triglot.Model):
    inputs, outputs = [X], [X]

    def infer(self, inputs):
        return inputs

"""
)


def test_a_class_with_infer_batch_alone(tmp_path: Path) -> None:
    text = f"{HEAD}class Lists(triglot.Model):\n    def infer_batch(self, inputs, calls): ...\n"
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        backends.load("python", tmp_path / "model.py")
    assert str(caught.value).endswith(
        "found no subclass of triglot.Model with an infer(): Lists has infer_batch but no infer"
    )


@pytest.mark.parametrize(
    ("own", "near"),
    [
        ("dynamic_baching = triglot.DynamicBatching()", "dynamic_batching"),
        ("instance = 2", "instances"),
        ("def infer_bach(self, inputs, calls): ...", "infer_batch"),
        ("input = [X]", ""),
        ("threshold = 0.5", ""),
        ("_inputs = [X]", ""),
    ],
)
def test_attributes_that_are_misspelt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: str, near: str
) -> None:
    (tmp_path / "model.py").write_text(f"{MODEL}    {own}\n")
    backends.load("python", tmp_path / "model.py")
    name = own.removeprefix("def ").partition(" ")[0].partition("(")[0]
    expected = [f"{tmp_path / 'model.py'}: Mine.{name}: did you mean '{near}'?"] if near else []
    assert [record.getMessage() for record in caplog.records] == expected


def write(folder: Path, own: str) -> Path:
    file = folder / "m.py"
    file.write_text(f"{MODEL}    {own}\n")
    return file


async def warnings(file: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """Of a server that loads the model."""
    caplog.set_level(logging.WARNING, "triglot")
    async with testing.serve(file, **options):
        return [record.getMessage() for record in caplog.records]


UNBATCHED = "class Mine: dynamic_batching: ignored without max_batch_size; requests run one by one"


@pytest.mark.parametrize(
    ("batching", "more", "noted"),
    [
        ("max_queue_delay=0.001", "", True),
        ("", "max_batch_size = 4", False),
        ("max_batch_size=4", "", False),
        ("policy=triglot.QueuePolicy(max_queue_size=1)", "", False),
        ("", "infer_batch = lambda self, inputs, calls: inputs", False),
    ],
)
async def test_batching_that_joins_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batching: str, more: str, noted: bool
) -> None:
    own = f"dynamic_batching = triglot.DynamicBatching({batching})\n    {more}"
    assert await warnings(write(tmp_path, own), caplog) == ([UNBATCHED] if noted else [])


@pytest.mark.parametrize(("size", "noted"), [(0, True), (1_000_000, False)])
async def test_cached_answers_without_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, noted: bool
) -> None:
    logged = await warnings(write(tmp_path, "response_cache = True"), caplog, response_cache_bytes=size)
    why = "m version 1: response_cache: ignored, as response_cache_bytes is 0"
    assert logged == ([why] if noted else [])


async def test_the_servers_own_frames_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, "dynamic_batching = triglot.DynamicBatching(max_queue_delay=-1)")
    with pytest.raises(ModelLoadError):
        await warnings(file, caplog)
    (record,) = [record for record in caplog.records if "could not be loaded" in record.getMessage()]
    assert "ValueError: dynamic_batching.max_queue_delay: expected 0 to" in record.getMessage()
    assert record.exc_info is not None
    trace, files = record.exc_info[2], []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert set(files) == {str(file)}


async def test_a_model_may_say_that_it_has_too_much_to_do(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        MODEL.replace("FP32", "INT32").replace("return inputs", "raise triglot.QueueFull('not now')")
    )
    async with testing.serve(tmp_path / "m.py") as server:
        with pytest.raises(triglot.QueueFull, match="not now") as caught:
            await Served(server.server).infer("m", np.zeros(1, np.int32))
    assert caught.value.code is triglot.Code.RESOURCE_EXHAUSTED
