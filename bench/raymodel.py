"""The model of the Ray bench: returns its input, after the work that the input's first element selects."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triglot

AT_ONCE, SLEEPS, COMPUTES, RECORDS = 0.0, 1.0, 2.0, 3.0
SECONDS, RECORDED_SECONDS = 0.002, 0.02
ROWS = 32
_BLOCK = bytes(64 * 1024)
SOURCE = """
from bench.raymodel import Works


class Model(Works):
    records = {records!r}
"""
PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
BEGUN = "begun-"


class Works(triglot.Model):
    """Return `x` as `y`, after the work.

    A recorded call has its number as the second element; the start of its run is written to a file in `records`.
    """

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)
    max_batch_size = ROWS
    records = ""

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        work(inputs["x"], self.records)
        return {"y": inputs["x"]}


def work(x: Any, records: str = "") -> None:
    """Do the work that `x[0, 0]` selects. The GIL is free nearly all the time."""
    what = x[0, 0]
    if what == SLEEPS:
        time.sleep(SECONDS)  # Stands for work of a device, not of this core.
    elif what == COMPUTES:
        end = time.thread_time() + SECONDS
        while time.thread_time() < end:
            hashlib.sha256(_BLOCK)
    elif what == RECORDS:
        with Path(records, f"{BEGUN}{os.getpid()}").open("a") as file:
            file.write(f"{x[0, 1]:.0f}\n")
        time.sleep(RECORDED_SECONDS)  # As above.


def begun(folder: Path) -> dict[int, Sequence[int]]:
    """Return the numbers of the recorded calls whose runs have begun, by process id."""
    files = {int(file.name.removeprefix(BEGUN)): file for file in folder.glob(f"{BEGUN}*")}
    return {pid: [int(line) for line in file.read_text().splitlines()] for pid, file in files.items()}


def write(repository: Path, name: str, parameters: Mapping[str, object], count: int, records: Path) -> None:
    """Write version 1 of the model into a model repository; servers and nodes must be able to import `bench`."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(SOURCE.format(records=str(records)))
    text = f'backend: "python"\ninstance_group {{ count: {count} }}\n'
    text += "".join(PARAMETER.format(*item) for item in parameters.items())
    (repository / name / "config.pbtxt").write_text(text)
