"""What a version held is freed when it is unloaded, and not when the garbage collector happens to come by."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_loads import until

from triglot import backends
from triglot.repository.manager import Manager

MODEL = """
import triglot


class Weights:
    pass


KEPT = Weights()


class Kept(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] if KEPT else None}
"""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    """The weights that are in memory."""
    return sum(type(one).__name__ == "Weights" for one in gc.get_objects())


@pytest.mark.alone  # The collector has a share of the time.
@pytest.mark.usefixtures("_no_collector")
async def test_what_a_module_holds(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(MODEL)
    manager = Manager([tmp_path], backends.load, max_queue_size=1, explicit=["m"])
    before = alive()
    await manager.load_all()
    try:
        assert alive() == before + 1
        (tmp_path / "m" / "model.py").write_text(f"{MODEL}\nCHANGED = True\n")
        await manager.load_model("m")
        await until(lambda: alive() == before + 1)
    finally:
        await manager.close()
