"""A model of a server process that waits until the test lets it go on."""

from __future__ import annotations

from pathlib import Path

from process import write_model
from waiting import wait_until

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
    """A model whose `load` and whose answers wait until the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder, GATE)

    def open(self, what: str | int) -> None:
        """Let it load ("load"), or let the requests with this value be answered, now or when they come."""
        (self.folder / f"open-{what}").touch()

    def wait_until_it_waits(self, what: str | int) -> None:
        """Until it has begun to load, or has begun on a request with this value."""
        wait_until((self.folder / f"waits-{what}").exists)

    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return (self.folder / "closed").exists()
