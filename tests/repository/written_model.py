"""A repository with one model, "m": a test says what stands in its class and in its configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.served_models import Served
from triglot import testing

CODE = """
import threading

import numpy as np
import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    OWN

    def infer(self, inputs):
        return {"y": np.full(len(inputs["x"]), TELLS, np.int32)}
"""
ROWS = 'len(inputs["x"])'
"""How many rows came together."""


def write(
    folder: Path, config: str | None = None, own: str = "pass", *, rows_code: str = ROWS, code: str = CODE
) -> Path:
    """The repository; the model returns the number of `rows_code`, once a row."""
    (folder / "m").mkdir(parents=True)
    (folder / "m" / "model.py").write_text(code.replace("OWN", own).replace("TELLS", rows_code))
    if config is not None:
        (folder / "m" / "config.pbtxt").write_text(config)
    return folder


@asynccontextmanager
async def serving(repository: Path, **options: Any) -> AsyncIterator[Served]:
    """A server of it, in this process."""
    async with testing.serve(repository, **options) as server:
        yield Served(server.server)
