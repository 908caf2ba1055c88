"""What a version held is freed when it is unloaded, and not when the garbage collector happens to come by."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until
from triglot import backends
from triglot.repository.manager.manager import Manager

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


def weights() -> list[weakref.ref[object]]:
    """Those that the collector sees."""
    return [weakref.ref(tracked) for tracked in gc.get_objects() if type(tracked).__name__ == "Weights"]


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("settled", [False, True])
async def test_what_a_module_holds(tmp_path: Path, settled: bool) -> None:
    """Also when the collector has been kept from what was there when the server had started."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(MODEL)
    manager = Manager([tmp_path], backends.load, max_queue_size=1, explicit=["m"])
    before = weights()
    await manager.load_all()
    try:
        (held,) = [weight for weight in weights() if weight not in before]
        if settled:
            manager.settle()
            assert weights() == []
        (tmp_path / "m" / "model.py").write_text(f"{MODEL}\nCHANGED = True\n")
        await manager.load_model("m")
        await until(lambda: held() is None)
        if settled:
            await until(lambda: weights() == [])
    finally:
        await manager.close()
