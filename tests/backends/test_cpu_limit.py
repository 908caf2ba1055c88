"""Threads of backends in a control group (cgroup) that allows less CPU time than there are CPUs."""

from __future__ import annotations

import sys

import pytest

from tests import environments
from tests.cgroups import output_on_one_cpu

ONNX = """
from triglot import backends
from triglot.run import DEMO

threads = lambda: len(os.listdir("/proc/self/task"))
import onnxruntime
before = threads()
model = backends.load("onnx", DEMO / "digits" / "1" / "model.onnx")
print(threads() - before)
"""
TORCH = """
from triglot.backends.torch import load
import torch

print(torch.get_num_threads())
"""
TORCH_OF_GRPS = TORCH.replace(
    "triglot.backends.torch import load", "triglot.backends.grps.torch_inferer import Path"
)
TENSORFLOW = """
from triglot.backends.tensorflow import session_options

options = session_options()
print(options.intra_op_parallelism_threads, options.inter_op_parallelism_threads)
"""
LIGHTGBM = """
import numpy as np
import lightgbm
from pathlib import Path
from triglot.core.call import Call
from triglot.backends.boosters.lightgbm import ONE_THREAD, LightgbmModel
from triglot.model.config import NO_CONFIG

x = np.arange(ONE_THREAD + 1.0).reshape(-1, 1)
booster = lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(x, x[:, 0]), 1)
model = LightgbmModel(Path("model.txt"), booster, NO_CONFIG)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
model.infer({"x": x}, Call())
print(threads() - before)
"""


def test_onnxruntime_starts_no_thread_for_a_second_cpu() -> None:
    assert output_on_one_cpu(sys.executable, ONNX) == "0\n"


# The oldest libraries are in another environment than this one.
@pytest.mark.newest
@pytest.mark.parametrize(
    ("environment", "code", "expected"),
    [
        ("torch", TORCH, "1\n"),
        ("torch", TORCH_OF_GRPS, "1\n"),
        ("tensorflow", TENSORFLOW, "1 1\n"),
        ("ml", LIGHTGBM, "0\n"),
    ],
    ids=["torch", "torch of grps projects", "tensorflow", "lightgbm"],
)
def test_library_in_its_own_environment_uses_one_thread(environment: str, code: str, expected: str) -> None:
    assert output_on_one_cpu(environments.python(environment), code) == expected
