"""The inputs that the server adds to those of a sequence's requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.scheduling.scripted_models import servable
from tests.scheduling.sequence_models import LONG, SUM, Summing, reading, refusal, send
from triglot import TensorSpec
from triglot.core.errors import Code
from triglot.model.scheduling import ControlInput, ControlKind


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BOOL"])
@pytest.mark.parametrize("kind", ["START", "READY", "END"])
async def test_flags_have_the_configured_values(kind: ControlKind, datatype: str, rows: int) -> None:
    pairs = {"INT32": (3, 7), "FP32": (-1.5, 2.25), "BOOL": (True, False)}
    false, true = pairs[datatype]
    batching = replace(LONG, controls=[ControlInput("flag", kind, datatype, false, true)])
    model = Summing(batching, rows=rows)
    request = servable(model)
    for at in range(3):
        await send(request, 1, 5, start=at == 0, end=at == 2)
    expected = {"START": [true, false, false], "READY": [true] * 3, "END": [false, false, true]}[kind]
    flags = [seen["flag"] for seen in model.seen]
    assert [flag.item() for flag in flags] == expected
    dtypes = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
    assert {(flag.dtype.type, flag.shape) for flag in flags} == {(dtypes[datatype], (1, 1) if rows else (1,))}
    await request.close()


IDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "UINT64": (np.uint64, [1, 2**64 - 1], ["a"]),
    "INT64": (np.int64, [1, 2**63 - 1], [2**63, "1"]),
    "UINT32": (np.uint32, [1, 2**32 - 1], [2**32, "1"]),
    "INT32": (np.int32, [1, 2**31 - 1], [2**31, "1"]),
    "BYTES": (np.object_, ["a", "größe"], [1]),
}


@pytest.mark.parametrize("datatype", IDS)
async def test_ids_of_every_datatype(datatype: str) -> None:
    dtype, fitting, others = IDS[datatype]
    model = Summing(replace(LONG, controls=[ControlInput("id", "CORRID", datatype)]))
    request = servable(model)
    for sequence_id in fitting:
        assert await send(request, 1, sequence_id, start=True) == 1
        seen = model.seen[-1]["id"]
        assert seen.dtype.type is dtype
        own = seen[seen != (b"" if datatype == "BYTES" else 0)]
        assert own.tolist() == [sequence_id.encode() if isinstance(sequence_id, str) else sequence_id]
    for sequence_id in others:
        error = await refusal(request, sequence_id, start=True)
        assert (error.code, "the type of the model's input 'id'" in error.message) == (Code.INVALID_ARGUMENT, True)
    assert reading(request, "sequences") == len(fitting)
    await request.close()


async def test_clients_neither_send_nor_get_what_the_server_adds() -> None:
    class Declaring(Summing):
        inputs = [
            *Summing.inputs,
            TensorSpec("start", "INT32", [-1, 1]),
            TensorSpec("before", "FP32", [-1, 1]),
        ]
        outputs = [*Summing.outputs, TensorSpec("after", "FP32", [-1, 1])]

    request = servable(Declaring(LONG))
    assert [spec.name for spec in request.signature.inputs] == ["x"]
    assert [spec.name for spec in request.signature.outputs] == ["y"]
    await request.close()
    request = servable(Declaring(replace(LONG, states=[replace(SUM, returned=True)])))
    assert [spec.name for spec in request.signature.outputs] == ["y", "after"]
    await request.close()
