"""Models that read with a DataLoader's worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import FREE_PORTS, Triglot, write_model
from tests.protocol_clients.rest import Rest

pytest.importorskip("torch", reason="the torch environment has it")

MODEL = """
import torch
import triglot


class Squares(torch.utils.data.Dataset):
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index] ** 2


class Reads(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    execution = "{execution}"

    def infer(self, inputs):
        loader = torch.utils.data.DataLoader(
            Squares([*range(inputs["x"].item())]), num_workers=1, multiprocessing_context="forkserver"
        )
        return {{"y": torch.cat(list(loader)).to(torch.int32).numpy()}}
"""


def test_its_workers_find_the_dataset(tmp_path: Path) -> None:
    for execution in ("thread", "process"):
        write_model(tmp_path / execution, MODEL.format(execution=execution))
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        rest = Rest(server.ports()[1])
        for execution in ("thread", "process"):
            status, answer = rest.infer(execution, 4)
            assert (status, answer["outputs"][0]["data"]) == (200, [0, 1, 4, 9])
        server.stop()
