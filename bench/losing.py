"""Measures how soon a call fails whose instance's process is lost, and how soon the process is replaced."""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import report
from direct_work import direct_infer
from triglot import backends
from triglot.core.call import Call
from triglot.core.errors import Code, ServingError
from triglot.executors.loading import Loading
from triglot.model.config import ModelConfig
from triglot.scheduling.servable import Servable

GOAL = 1.0
"""Most seconds until the call fails."""
BEGUN = "begun"
MODEL = """
import time
import triglot
from pathlib import Path

class Model(triglot.Model):
    inputs = (triglot.TensorSpec("forever", "BOOL", []),)
    outputs = (triglot.TensorSpec("y", "BOOL", []),)
    execution = "process"

    def infer(self, inputs):
        if inputs["forever"]:
            Path(__file__).with_name("begun").touch()
            while True:
                time.sleep(0.1)  # Neither computes nor ends.
        return {"y": inputs["forever"]}
"""
WAYS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
COLUMNS = ("the process is", "UNAVAILABLE after ms", "longest", "the next call answered after ms", "longest")


@dataclass(frozen=True, slots=True)
class Loss:
    """Seconds from the loss of the process until its call failed, and until the next call was answered."""

    failed_after: float
    replaced: float


async def lose(way: signal.Signals, times: int) -> list[Loss]:
    """Signal the process of a model, `times` times. Raise `RuntimeError` for a call with an unexpected end."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        file = Path(name) / "model.py"
        file.write_text(MODEL)
        others = _children()
        model = await asyncio.to_thread(Loading(backends.load), "lost", "python", file, ModelConfig())
        await asyncio.to_thread(model.start)
        servable = Servable("lost", 1, model, max_queue_size=10)
        try:
            return [await _lose(servable, way, file.with_name(BEGUN), others) for _ in range(times)]
        finally:
            await servable.close()


async def _lose(servable: Servable, way: signal.Signals, begun: Path, others: set[int]) -> Loss:
    (process,) = _children() - others
    call = asyncio.ensure_future(direct_infer(servable, {"forever": np.array(True)}, Call()))
    await asyncio.to_thread(_await_file, begun)
    lost = time.perf_counter()
    os.kill(process, way)
    try:
        await call
    except ServingError as error:
        if error.code is not Code.UNAVAILABLE:
            raise RuntimeError(f"expected UNAVAILABLE, got {error!r}") from None
    else:
        raise RuntimeError("a call without end was answered")
    failed_after = time.perf_counter() - lost
    await direct_infer(servable, {"forever": np.array(False)}, Call())
    return Loss(failed_after, time.perf_counter() - lost)


def _await_file(file: Path) -> None:
    """Wait until the model has created the file, and delete it."""
    while not file.exists():
        time.sleep(0.01)  # No event signals that another process has created a file.
    file.unlink()


def _children() -> set[int]:
    """Return the ids of this process's children."""
    found: set[int] = set()
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended in the meantime.
            found.update(map(int, file.read_text().split()))
    return found


def lines(losses: Mapping[str, Sequence[Loss]]) -> Iterator[str]:
    """Yield the table, and its conclusion."""
    rows = []
    for way, found in losses.items():
        rows.append(
            (way, *_spread([loss.failed_after for loss in found]), *_spread([loss.replaced for loss in found]))
        )
    yield report.plain(COLUMNS, rows)
    longest = max(loss.failed_after for found in losses.values() for loss in found)
    yield f"a call of a lost process fails after {longest:.2f} s at the latest, goal {GOAL:g}"


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    """Return the median and the maximum, in ms."""
    return f"{statistics.median(seconds) * 1e3:,.1f}", f"{max(seconds) * 1e3:,.1f}"
