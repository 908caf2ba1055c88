"""A model in pure Python that holds the GIL while it works."""

from pathlib import Path

STEPS = 30_000
"""Iterations of a loop in pure Python, which take some milliseconds."""
MODEL = """
import triglot


class Model(triglot.Model):
    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)
    instances = {instances}
    max_queue_size = {max_queue_size}

    def infer(self, inputs):
        number = 0
        for step in range({steps}):
            number = (number * 31 + step) % 1000003
        return {{"y": {gives}}}
"""
GIVES_BACK, COMPUTES = 'inputs["x"]', '-inputs["x"]'


def write(
    folder: Path, instances: int, steps: int = STEPS, max_queue_size: int | None = None, gives: str = GIVES_BACK
) -> Path:
    """Write the model into a new folder; returns the path of its file."""
    folder.mkdir(parents=True)
    file = folder / "model.py"
    file.write_text(MODEL.format(instances=instances, steps=steps, max_queue_size=max_queue_size, gives=gives))
    return file
