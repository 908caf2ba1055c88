"""The state of sequences that the server keeps, and sequences whose answers are streams."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer, direct_stream
from tests.scheduling.scripted_models import Inputs, servable
from tests.scheduling.sequence_models import (
    CONTROLS,
    HOUR,
    LONG,
    SUM,
    Driver,
    Summing,
    rows_of,
    send,
    sequence_call,
)
from tests.waiting import until
from triglot import Call, InvalidArgument, Model, TensorSpec
from triglot.core.errors import Internal
from triglot.core.tensor import object_array
from triglot.model.scheduling import InitialState, SequenceBatching, SequenceState

# --- state ---


def state_of(**changes: Any) -> SequenceBatching:
    return replace(LONG, states=[replace(SUM, **changes)])


async def test_a_state_begins_with_what_a_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "initial"
    file.write_bytes(np.array([100], np.float32).tobytes())
    request = servable(Summing(state_of(initial=InitialState("FP32", [1], file))))
    assert await asyncio.gather(*[send(request, number, number, start=True) for number in (1, 2)]) == [101, 102]
    assert await send(request, 1, 2) == 103
    await request.close()


async def test_a_file_that_is_no_initial_state(tmp_path: Path) -> None:
    file = tmp_path / "initial"
    file.write_bytes(b"abc")
    batching = state_of(initial=InitialState("FP32", [1], file))
    with pytest.raises(ValueError, match=r"initial state of 'before': .*: expected 4 bytes, got 3"):
        servable(Summing(batching))
    file.unlink()
    with pytest.raises(ValueError, match=r"initial state of 'before': .*: No such file"):
        servable(Summing(batching))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({}, r"the model returned no state 'after', only \['y'\]"),
        ({"after": np.ones((1, 1))}, "the model returned state 'after' as FP64, expected FP32"),
        ({"after": np.ones((1, 2), "f4")}, r"returned state 'after' with shape \[1,2\], expected \[1,1\]"),
    ],
)
async def test_a_wrong_state_is_the_models_error_and_the_former_one_stays(
    answer: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Summing):
        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            return {"y": inputs["x"]} | answer if inputs["x"].item() == 13 else super().infer(inputs, call)

    request = servable(Wrong(LONG))
    assert await send(request, 1, 5, start=True) == 1
    with pytest.raises(Internal, match=text):
        await send(request, 13, 5)
    assert len(caplog.records) == 1
    assert await send(request, 1, 5) == 2
    await request.close()


class Gathering(Model):
    """Answers all words of its sequence; its state has as many elements as there were words."""

    inputs = [TensorSpec("word", "BYTES", [-1, 1])]
    outputs = [TensorSpec("words", "BYTES", [-1, -1])]
    max_batch_size = 4
    sequence_batching = SequenceBatching(max_idle=HOUR, states=[SequenceState("old", "new", "BYTES", [-1])])

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        words = np.concatenate([inputs["old"], inputs["word"]], axis=1)
        return {"words": words, "new": words}


async def test_states_of_texts_that_grow() -> None:
    request = servable(Gathering())

    async def send(word: bytes, sequence_id: int, *, start: bool = False) -> list[bytes]:
        inputs = {"word": object_array([word], (1, 1))}
        answer = await direct_infer(request, inputs, sequence_call(sequence_id, start=start))
        return [text for text in answer["words"].ravel().tolist() if text]

    assert tuple(await asyncio.gather(send(b"a", 1, start=True), send(b"x", 2, start=True))) == ([b"a"], [b"x"])
    assert await send(b"b", 1) == [b"a", b"b"]
    # They are of unlike length now.
    both = tuple(await asyncio.gather(send(b"c", 1), send(b"y", 2), send(b"z", 2)))
    assert both == ([b"a", b"b", b"c"], [b"x", b"y"], [b"x", b"y", b"z"])
    await request.close()


class Longer(Model):
    """Answers its state, and gives one that is longer by a letter, as texts of numpy's own."""

    inputs = [TensorSpec("x", "FP32", [-1, 1])]
    outputs = [TensorSpec("y", "BYTES", [-1, 1])]
    max_batch_size = 4
    sequence_batching = SequenceBatching(max_idle=HOUR, states=[SequenceState("old", "new", "BYTES", [1])])

    def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
        return {"y": inputs["old"], "new": np.array([[old.decode() + "x"] for [old] in inputs["old"]])}


async def test_texts_of_unlike_lengths_are_in_one_batch() -> None:
    driver = Driver(Longer())
    x = {"x": np.zeros((1, 1), np.float32)}
    first = driver.put_inputs(x, sequence_call(1, start=True))
    assert driver.run()
    assert first.future.result()["y"].tolist() == [[b""]]
    for words in ([b"x", b""], [b"xx", b"x"]):
        sent = [
            driver.put_inputs(x, sequence_call(number, start=not words[-1] and number == 2)) for number in (1, 2)
        ]
        batch = driver.take()
        assert rows_of(batch) == [1, 2]
        assert batch is not None
        driver.finish(batch)
        assert [request.future.result()["y"].tolist() for request in sent] == [[[word]] for word in words]


async def test_a_model_that_uses_its_buffer_again_does_not_change_the_state() -> None:
    class Reusing(Summing):
        buffer = np.zeros((1, 1), np.float32)

        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            self.buffer[:] = inputs["x"] + inputs["before"]
            return {"y": self.buffer.copy(), "after": self.buffer}

    request = servable(Reusing(LONG, rows=1, instances=1))
    assert await send(request, 1, 1, start=True) == 1
    assert await send(request, 5, 1) == 6
    await request.close()


# --- streams ---


async def test_a_stream_is_a_request_like_any_other() -> None:
    request = servable(Summing(LONG))

    async def stream(value: float, **flags: Any) -> list[float]:
        inputs = {"x": np.full((1, 1), value, np.float32)}
        return [answer["y"].item() async for answer in direct_stream(request, inputs, sequence_call(5, **flags))]

    assert await stream(1, start=True) == [1]
    assert await send(request, 2, 5) == 3
    # And beside requests of other sequences.
    streamed, unstreamed = await asyncio.gather(stream(3, end=True), send(request, 1, 6, start=True, end=True))
    assert (streamed, unstreamed) == ([6], 1)
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        await stream(1)
    await request.close()


class Repeating(Summing):
    """Decoupled: yields its input as often as its sequence has had requests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SequenceBatching(max_idle=HOUR, controls=CONTROLS), **options)
        self.count: dict[int, int] = {}

    def infer(self, inputs: Inputs, call: Call) -> Any:
        number = int(inputs["id"].item())
        self.count[number] = 1 if inputs["start"].item() else self.count[number] + 1
        for _ in range(self.count[number]):
            yield {"y": inputs["x"]}


@pytest.mark.parametrize("rows", [0, 3])
async def test_a_decoupled_model_has_sequences(rows: int) -> None:
    request = servable(Repeating(rows=rows))

    async def ask(value: float, sequence_id: int, **flags: Any) -> list[float]:
        inputs = {"x": np.full((1, 1) if rows else (1,), value, np.float32)}
        call = sequence_call(sequence_id, **flags)
        return [answer["y"].item() async for answer in direct_stream(request, inputs, call)]

    requests = [ask(at, number, start=at == 0, end=at == 2) for at in range(3) for number in (1, 2)]
    assert await asyncio.gather(*requests) == [[at] * (at + 1) for at in range(3) for _ in (1, 2)]
    await until(lambda: not request.leases)  # The threads tell the loop after their last answer.
    await request.close()
