"""DLPack between the tensors of Triton Python models and torch's."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.triton_served import X_TO_Y, serving, write_model
from triglot.backends.triton_python.datatypes import NUMBERS
from triglot.backends.triton_python.errors import TritonModelException
from triglot.backends.triton_python.tensor import Tensor
from triglot.core.tensor import DATATYPES

NUMERIC = [name for name in NUMBERS if name != "BYTES"]


def sample(datatype: str) -> Any:
    return (np.arange(6) % 2).astype(DATATYPES[datatype].dtype).reshape(2, 3)


@pytest.mark.parametrize("datatype", NUMERIC)
def test_every_datatype_round_trip(datatype: str) -> None:
    from_torch = torch.from_dlpack(Tensor("X", sample(datatype)).to_dlpack())
    assert from_torch.tolist() == [[0, 1, 0], [1, 0, 1]]
    assert torch.from_dlpack(Tensor.of("X", sample(datatype))).dtype == from_torch.dtype
    for value in (from_torch, torch.utils.dlpack.to_dlpack(from_torch), from_torch.t().contiguous().t()):
        back = Tensor.from_dlpack("Y", value)
        assert_array_equal(back.as_numpy(), sample(datatype))
        assert back.as_numpy().dtype == sample(datatype).dtype


def test_a_tensor_with_a_gradient() -> None:
    with pytest.raises(TritonModelException, match="Tensor 'X': "):
        Tensor.from_dlpack("X", torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("made", ["from_dlpack(x.to_dlpack())", "from_numpy(x.as_numpy())"])
async def test_a_model_of_torchs(tmp_path: Path, made: str) -> None:
    code = f"""
class TritonPythonModel:
    def initialize(self, args):
        torch.set_grad_enabled(False)
        self.layer = torch.nn.Linear(1, 1)
        self.layer.weight.fill_(2)
        self.layer.bias.fill_(1)

    def execute(self, requests):
        [x] = requests[0].inputs()
        y = self.layer(torch.{made}[:, None])[:, 0]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y.numpy())])]
"""
    write_model(tmp_path, "m", code, X_TO_Y.replace("INT32", "FP32"), imports="import torch")
    async with serving(tmp_path) as client:
        x = np.array([1, 2.5], np.float32)
        assert_array_equal((await client.infer("m", {"X": x})).outputs["Y"], [3, 6])
