"""Programs of PyTorch and configurations for tests. Importing it needs torch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import triglot
from triglot import backends
from triglot.core.errors import Code, ModelLoadError
from triglot.model.config import NO_CONFIG, InstanceGroup, ModelConfig, TensorConfig

SAMPLES: dict[str, Any] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255, 7], "u1"),
    "UINT16": np.array([0, 2**16 - 1, 7], "u2"),
    "UINT32": np.array([0, 2**32 - 1, 7], "u4"),
    "UINT64": np.array([0, 2**64 - 1, 7], "u8"),
    "INT8": np.array([-128, 127, 7], "i1"),
    "INT16": np.array([-(2**15), 2**15 - 1, 7], "i2"),
    "INT32": np.array([-(2**31), 2**31 - 1, 7], "i4"),
    "INT64": np.array([-(2**63), 2**63 - 1, 7], "i8"),
    "FP16": np.array([-1.5, np.inf, 65504], "f2"),
    "FP32": np.array([-1.5, np.nan, np.inf], "f4"),
    "FP64": np.array([-1.5, np.nan, 5e-324], "f8"),
    "BF16": np.array([-1.5, np.nan, 3e38], ml_dtypes.bfloat16),
    "COMPLEX64": np.array([-1.5j, np.nan, 1 + np.inf * 1j], "c8"),
    "COMPLEX128": np.array([-1.5j, np.nan, 1 + np.inf * 1j], "c16"),
}
"""Every datatype of torch's, with some elements of it."""
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
ON_CPU = InstanceGroup("CPU")
WHERE_SAVED = InstanceGroup("MODEL")


class Program(torch.nn.Module):  # type: ignore[misc]
    """Gives what a function of itself and its input gives; `count` is a buffer, `offset` a constant."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.zeros(1))
        self.offset = torch.ones(1)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Pair(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: Any, b: Any, *, scale: int = 1, bias: Any = None) -> Any:
        result = (a - b) * scale
        return result if bias is None else result + bias


class Scores(torch.nn.Module):  # type: ignore[misc]
    """Gives a dict."""

    def forward(self, x: Any) -> Any:
        return {"score": x.sum(1), "best": x.argmax(1)}


class Counter(torch.nn.Module):  # type: ignore[misc]
    """Changes a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x)
        return self.count


def forward(arguments: str, body: str) -> str:
    """The source of a method, for `grps_torch_scripts.script`."""
    return f"def forward(self, {arguments}):\n    {body}"


def export(file: Path, module: Any, *example: Any, dims: Any = None, **named: Any) -> Path:
    """A module's exported program, saved to the file."""
    with warnings.catch_warnings():
        # Of torch's own parts, and of inputs that the program changes.
        warnings.simplefilter("ignore")
        program = torch.export.export(module.eval(), example, named, dynamic_shapes=dims)
        with file.open("wb") as stream:
            torch.export.save(program, stream)
    return file


def skip_unless_exported(datatype: str) -> None:
    """Where `torch.export.save` has no name for it."""
    if datatype in ("UINT32", "UINT64") and VERSION < (2, 13):
        pytest.skip(f"torch {torch.__version__} saves no exported program with {datatype}")


def load(file: Path, config: ModelConfig = NO_CONFIG) -> triglot.Model:
    return backends.load("torch", file, config)


def refused(file: Path, config: ModelConfig = NO_CONFIG, code: Code = Code.UNKNOWN) -> str:
    """What is wrong with the file or its configuration, without the file's name in front."""
    with pytest.raises(ModelLoadError) as caught:
        load(file, config)
    assert caught.value.code is code
    text = str(caught.value)
    place = config.source or str(file)
    assert text.startswith(f"{place}: ")
    return text.removeprefix(f"{place}: ")


def config(
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    *,
    groups: Sequence[InstanceGroup] = (),
    batch: int = 0,
) -> ModelConfig:
    """These inputs and outputs are FP32 vectors."""
    return ModelConfig(
        inputs=[TensorConfig(name, "FP32", [-1]) for name in inputs],
        outputs=[TensorConfig(name, "FP32", [-1]) for name in outputs],
        instance_groups=groups,
        max_batch_size=batch,
        source="config.pbtxt",
    )


def fp32(*values: float) -> Any:
    """An array as a request brings it: nothing can be written to."""
    array = np.array(values, "f4")
    array.flags.writeable = False
    return array


def lists(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in answer.items()}


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What the call gives, made by a thread of its own."""
    given: list[Any] = []
    thread = threading.Thread(target=lambda: given.append(call()))
    thread.start()
    thread.join()
    (result,) = given
    return result
