"""Tensors through a process: any make the round trip, and none are overwritten."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.executors.reporting_models import load, reporting, write_reporting
from tests.executors.test_process_frames import arrays, raw
from tests.executors.test_process_regions import held
from triglot import Call
from triglot.executors.remote import frames
from triglot.executors.remote.channel import Channel
from triglot.executors.remote.frames import FrameError, Kind
from triglot.executors.remote.shared_memory import COPIED

# --- tensors ---


@pytest.fixture(name="echo", scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("echo")
    body = """def infer(self, inputs, call):
        return {name: value for name, value in inputs.items() if name != "code"}"""
    model = load(write_reporting(folder, body))
    yield model
    model.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=5), arrays(), max_size=3))
def test_any_tensors_round_trip(echo: Any, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors.pop("code", None)
    answer = echo.infer(tensors, Call())
    assert {name: raw(array) for name, array in answer.items()} == {
        name: raw(array) for name, array in tensors.items()
    }


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_answers_stay_as_they_are_while_others_come(echo: Any, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 4095, 4097, 100_000]), min_size=1, max_size=8))
    kept = [echo.infer({"x": np.full(size, number, np.float64)}, Call())["x"] for number, size in enumerate(sizes)]
    for number, (size, array) in enumerate(zip(sizes, kept, strict=True)):
        assert array.shape == (size,)
        assert (array == number).all()


@given(hnp.arrays(np.uint8, 10))
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_large_tensors(echo: Any, seed: np.ndarray[Any, Any]) -> None:
    large = np.resize(seed, 5_000_001)
    assert (echo.infer({"x": large}, Call())["x"] == large).all()


async def test_what_a_model_keeps_of_its_inputs_stays(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        for value in range(5):
            await served.run("self.state[len(self.state)] = inputs['x']", x=np.full(50_000, value))
        same = "all((self.state[number] == number).all() for number in range(5))"
        assert await served.ask(same) == "True"


async def test_outputs_of_any_layout_and_kind(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        x = np.arange(60_000).reshape(200, 300)
        parts = (
            "{'t': inputs['x'].T, 's': inputs['x'][::2, ::3], 'same': inputs['x'], 'list': [[1.5, 2.5]], 'u': 'ü'}"
        )
        answer = await served.run(parts, x=x)
        assert (answer["t"] == x.T).all()
        assert (answer["s"] == x[::2, ::3]).all()
        assert (answer["same"] == x).all()
        assert answer["list"].tolist() == [[1.5, 2.5]]
        assert answer["u"].item() == "ü".encode()


async def test_inputs_are_read_only(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        for size in (10, 100_000):
            assert await served.ask("inputs['x'].flags.writeable", x=np.zeros(size)) == "False"


def test_a_frame_that_is_too_long_says_later_what_it_was_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 10_000)
    local, other = (Channel(end) for end in socket.socketpair())
    sizes = []
    for _ in range(5):
        local.send(Kind.CALL, placed=local.place({"x": np.zeros(COPIED)}))
        assert other.receive().tensors is not None
        with pytest.raises(FrameError, match="expected at most 10000"):
            other.send(Kind.DONE, placed=other.place({"y" * 70_000: np.zeros(COPIED)}))
        other.send(Kind.FAILED)
        local.receive()
        sizes.append((held(local.arena), held(other.arena)))
    # The same region again and again, and none of what was not sent.
    assert len(set(sizes)) == 1
    assert sizes[0][1] == 0
    local.close()
    other.close()
