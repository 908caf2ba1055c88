"""Shared memory and models that hand their inputs on: to other models, and to processes (spec 3.10)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.protocols.kserve_served import Served, serve_models
from tests.protocols.tensor_places import (
    PREFIX,
    SIZE,
    Memory,
    Wishes,
    X,
    ask,
    filled,
    memory,
    message_of,
    register,
)
from triglot.core.errors import Code
from triglot.core.types import OutputOptions, RegionSlice
from triglot.protocols.kserve.regions import Checkout, Region

BEFORE, AFTER = 3, 5
PLACED: Wishes = {"y": OutputOptions(region=RegionSlice("into", 0, SIZE))}


@asynccontextmanager
async def serving(codes: Mapping[str, str], folder: Path) -> AsyncIterator[tuple[Served, Memory, Memory]]:
    """The models, by name, and the regions "r", filled, and "into"."""
    for name, code in codes.items():
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(f"SIZE, AFTER = {SIZE}, {AFTER}\n{code}")
    options: dict[str, Any] = {"shared_memory_prefix": PREFIX, "response_cache_bytes": 4 * SIZE}
    with memory(SIZE) as made, memory(SIZE) as into:
        made.put(filled("FP32", BEFORE, SIZE))
        async with serve_models([folder / name for name in codes], **options) as served:
            for name, region in (("r", made), ("into", into)):
                assert await register(served, name, region, SIZE) == (Code.OK, "")
            yield served, made, into


CALLERS = {
    "inner": """
import numpy as np
import triglot

class Changing(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    response_cache = True

    def infer(self, inputs, call):
        if path := call.parameters.get("path"):
            with open(path, "r+b") as file:
                file.write(np.full(SIZE // 4, AFTER, "f4").tobytes())
        return {"y": inputs["x"].copy()}
""",
    "outer": """
import triglot

class Calling(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    inputs_in_place = True

    def infer(self, inputs, call):
        return call.infer("inner", {"x": inputs["x"]})
""",
    "steps": """
import triglot

class Steps(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    steps = [triglot.Step("inner", inputs={"x": "x"}, outputs={"y": "y"})]
    inputs_in_place = True
""",
}


@pytest.mark.parametrize("caller", ["outer", "steps"])
async def test_models_that_call_others(caller: str, tmp_path: Path) -> None:
    """The others get a copy: their caches must not keep an answer to what has been changed."""
    async with serving(CALLERS, tmp_path) as (served, made, into):
        for after in (AFTER, BEFORE):  # The second answer is the cache's: nothing runs.
            message = message_of(caller, X, PLACED)
            message.parameters["path"].string_param = str(made.path)
            assert (await served.grpc.call("ModelInfer", message.SerializeToString()))[0] is Code.OK
            assert into.get(SIZE) == filled("FP32", BEFORE, SIZE)
            assert made.get(SIZE) == filled("FP32", after, SIZE)
            made.put(filled("FP32", BEFORE, SIZE))
            into.put(bytes(SIZE))


IN_PROCESS = """
import triglot

class Doubling(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    execution = "process"

    def infer(self, inputs):
        return {"y": inputs["x"] * 2}
"""


@pytest.mark.parametrize("interface", ["grpc", "rest"])
async def test_a_model_in_a_process(interface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy, which is made once: from the region into what it shares with its process."""
    lent, original = [], Region.lend

    def lend(*arguments: Any) -> Checkout | None:
        lent.append(original(*arguments))
        return lent[-1]

    monkeypatch.setattr(Region, "lend", lend)
    async with serving({"doubling": IN_PROCESS}, tmp_path) as (served, _, into):
        assert (await ask(served, interface, "doubling", X, PLACED)).code is Code.OK
        assert into.get(SIZE) == filled("FP32", 2 * BEFORE, SIZE)
    assert len(lent) == 1
    assert lent[0] is not None
