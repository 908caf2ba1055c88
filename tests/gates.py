"""A model for server processes that waits until the test lets it continue."""

from __future__ import annotations

from pathlib import Path

from tests.process import write_model
from tests.waiting import wait_until

GATE = """
import time
import triglot

class Gate(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]
    instances = 4

    def load(self, folder):
        self.folder = folder
        self.wait_for("load")

    def infer(self, inputs):
        self.wait_for(str(inputs["x"][0]))
        return {"y": inputs["x"]}

    def wait_for(self, name):
        (self.folder / f"waits-{name}").touch()
        while not (self.folder / f"open-{name}").exists():
            time.sleep(0.005)

    def close(self):
        (self.folder / "closed").touch()
"""


class Gate:
    """Writes a model whose `load` and `infer` wait for files that this object creates in the model's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder, GATE)

    def open(self, what: str | int) -> None:
        """Let the model load ("load"), or let current and later requests with this value continue."""
        (self.folder / f"open-{what}").touch()

    def wait_until_it_waits(self, what: str | int) -> None:
        """Wait until the model has begun to load ("load"), or to execute a request with this value."""
        wait_until((self.folder / f"waits-{what}").exists)

    def is_closed(self) -> bool:
        """Return whether the model's `close()` was called."""
        return (self.folder / "closed").exists()
