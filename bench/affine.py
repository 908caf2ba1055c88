"""A model whose batches of n rows take a + b·n seconds, for servers and for the engine; settings of batching."""

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
    """Return its input `x` as `y` after `fixed` + `per_row` · rows seconds, without holding the GIL.

    `x` and `y` are FP32 of shape [rows, elements].
    """

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)
    max_batch_size = MAX_BATCH_SIZE
    fixed, per_row = A, B

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        time.sleep(self.fixed + self.per_row * len(x))  # Stands for work of a device, not of this core.
        return {"y": x}


@dataclass(frozen=True, slots=True)
class Batching:
    """Settings of dynamic batching; no batching unless `on`. `delay` is in seconds, `sizes` in rows."""

    name: str
    on: bool = True
    delay: float = 0.0
    sizes: Sequence[int] = ()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `triglot.DynamicBatching`."""
        return {"max_queue_delay": self.delay, "preferred_sizes": tuple(self.sizes)}

    def source(self) -> str:
        """Return the settings as Python source."""
        words = ", ".join(f"{name}={value!r}" for name, value in self.arguments().items())
        return f"triglot.DynamicBatching({words})" if self.on else "None"


def model(batching: Batching) -> Affine:
    """Return the model, to be run without a server."""
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
    """Write version 1 of the model into its folder of a model repository.

    The server must run in the root of this project's repository, where the model imports `bench`.
    """
    (folder / "1").mkdir(parents=True)
    text = MODEL.format(
        fixed=fixed,
        per_row=per_row,
        max_batch_size=max_batch_size,
        max_queue_size=max_queue_size,
        batching=batching.source(),
    )
    (folder / "1" / "model.py").write_text(text)
