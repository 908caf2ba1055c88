"""A model in pure Python that holds the interpreter's lock while it works."""

from pathlib import Path

STEPS = 30_000
"""Of a loop in pure Python: some milliseconds."""
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
    """Make the model's file in a new folder."""
    folder.mkdir(parents=True)
    file = folder / "model.py"
    file.write_text(MODEL.format(instances=instances, steps=steps, max_queue_size=max_queue_size, gives=gives))
    return file
