"""A model whose batches cost a + b·n, as it is served and as the engine runs it, with one or another batching."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triglot

A, B = 0.002, 0.00002
MAX_BATCH_SIZE = 256
MODEL = """
import triglot
from bench.affine import Affine


class Model(Affine):
    fixed, per_row = {fixed!r}, {per_row!r}
    max_batch_size = {max_batch_size!r}
    max_queue_size = {max_queue_size!r}
    dynamic_batching = {batching}
"""


class Affine(triglot.Model):
    """Gives back what it gets, `fixed` + `per_row` · rows seconds later; the interpreter's lock is free then."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)
    max_batch_size = MAX_BATCH_SIZE
    fixed, per_row = A, B

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        time.sleep(self.fixed + self.per_row * len(x))  # Is the work: a device's, not this core's.
        return {"y": x}


@dataclass(frozen=True, slots=True)
class Batching:
    """A way to batch, or none."""

    name: str
    on: bool = True
    delay: float = 0.0
    sizes: Sequence[int] = ()

    def arguments(self) -> dict[str, Any]:
        """Of `triglot.DynamicBatching`."""
        return {"max_queue_delay": self.delay, "preferred_sizes": tuple(self.sizes)}

    def source(self) -> str:
        """The same as Python code."""
        words = ", ".join(f"{name}={value!r}" for name, value in self.arguments().items())
        return f"triglot.DynamicBatching({words})" if self.on else "None"


def model(batching: Batching) -> Affine:
    """The model, to be run without a server."""
    made = Affine()
    made.dynamic_batching = triglot.DynamicBatching(**batching.arguments()) if batching.on else None
    return made


def write(
    folder: Path,
    batching: Batching,
    *,
    fixed: float = A,
    per_row: float = B,
    max_batch_size: int = MAX_BATCH_SIZE,
    max_queue_size: int | None = None,
) -> None:
    """Make version 1 of the model in its folder of a repository; the server runs from the repository's root."""
    (folder / "1").mkdir(parents=True)
    text = MODEL.format(
        fixed=fixed,
        per_row=per_row,
        max_batch_size=max_batch_size,
        max_queue_size=max_queue_size,
        batching=batching.source(),
    )
    (folder / "1" / "model.py").write_text(text)
