"""Decoupled Triton Python models of sequences: many responses to a request, and one request of each at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.triton_served import DECOUPLED, GrpcClient, reply, request, serving, write_model

SEQUENCES = (
    DECOUPLED
    + """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  direct { }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
instance_group [ { kind: KIND_CPU count: 2 } ]
"""
)
FINAL = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
COUNTS = """
class TritonPythonModel:
    \"\"\"Answers x with the next x numbers of its sequence, and its end with 100 times the sequence's id.\"\"\"

    def initialize(self, args):
        self.next = {{}}

    {kind} execute(self, requests):
        (request,) = requests
        x, start, end, sequence = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0].item()
            for name in ("X", "START", "END", "CORRID")
        )
        assert sequence == request.correlation_id()
        sender = request.get_response_sender()
        if x == -1:
            raise ValueError("not below zero")
        if x == -2:
            error = pb_utils.TritonError("wrong number", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), {final})
            return
        if x == -3:
            return
        if x == -4:
            return "what nobody asked for"
        first = 0 if start else self.next[sequence]
        self.next[sequence] = first + x
        values = [*range(first, first + x), *([100 * sequence] if end else [])]
        {send}

    def send(self, sender, values):
        for value in values:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value], np.int32))]))
        sender.send(flags={final})
"""
AT_ONCE = "self.send(sender, values)"
LATER = "threading.Thread(target=self.send, args=(sender, values)).start()"


@asynccontextmanager
async def counting(
    folder: Path, kind: str = "def", send: str = LATER, config: str = SEQUENCES
) -> AsyncIterator[GrpcClient]:
    code = COUNTS.format(kind=kind, send=send, final=FINAL)
    async with serving(write_model(folder, "m", code, config)) as client:
        yield client


async def outcome(client: GrpcClient, sequence: int, *xs: int, end: bool = True, start: bool = True) -> list[Any]:
    """The responses to the requests of a sequence, one after the other on a stream: values, and errors' texts."""
    requests = [
        request(
            "m",
            {"X": np.array([x], np.int32)},
            parameters={
                "sequence_id": sequence,
                "sequence_start": start and at == 0,
                "sequence_end": end and at == len(xs) - 1,
            },
        )
        for at, x in enumerate(xs)
    ]
    return [
        message.error_message or reply(message.infer_response).outputs["Y"].item()
        async for message in client.stream(requests)
    ]


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("send", [AT_ONCE, LATER], ids=["at once", "later"])
@pytest.mark.parametrize("place", ["", 'parameters { key: "execution" value { string_value: "process" } }'])
async def test_sequences_side_by_side(place: str, send: str, kind: str, tmp_path: Path) -> None:
    async with counting(tmp_path, kind, send, SEQUENCES + place) as client:
        sequences = {1: (2, 3, 1), 2: (4, 0, 1), 7: (1, 1)}  # One more than there are instances.
        found = await asyncio.gather(*(outcome(client, number, *xs) for number, xs in sequences.items()))
        assert found == [[*range(sum(xs)), 100 * number] for number, xs in sequences.items()]


async def test_more_answers_than_fit_into_a_buffer(tmp_path: Path) -> None:
    async with counting(tmp_path, send=AT_ONCE) as client:
        assert await outcome(client, 3, 5000, end=False) == list(range(5000))
        assert await outcome(client, 3, 2, start=False) == [5000, 5001, 300]


async def test_errors_end_their_request_and_not_the_sequence(tmp_path: Path) -> None:
    async with counting(tmp_path) as client:
        assert await outcome(client, 5, 2, end=False) == [0, 1]
        for wrong, text in (
            (-1, "ValueError: not below zero"),
            (-2, "wrong number"),
            (-3, "the model released the request's response sender"),
            (-4, "the execute function must return None, got str"),
        ):
            (error,) = await outcome(client, 5, wrong, start=False, end=False)
            assert text in error
        assert await outcome(client, 5, 1, start=False) == [2, 500]


async def test_a_reader_that_leaves_holds_nothing_up(tmp_path: Path) -> None:
    async with counting(tmp_path) as client:
        begun = request(
            "m",
            {"X": np.array([20_000], np.int32)},
            parameters={"sequence_id": 4, "sequence_start": True, "sequence_end": True},
        )
        async for message in client.stream([begun]):
            assert reply(message.infer_response).outputs["Y"].item() == 0
            break
        # As many as there are instances, and more.
        found = await asyncio.gather(*(outcome(client, number, 2) for number in (11, 12, 13, 14)))
        assert found == [[0, 1, 100 * number] for number in (11, 12, 13, 14)]


async def test_a_sequence_that_has_not_begun(tmp_path: Path) -> None:
    async with counting(tmp_path) as client:
        (error,) = await outcome(client, 9, 1, start=False)
        assert "must specify the START flag" in error
