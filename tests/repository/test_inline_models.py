"""Models in a repository that are to run on the event loop: `execution` "inline" in a class or a configuration."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from written_model import CODE, serving, write

from triglot.core.errors import ModelLoadError

TRITON = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
TENSORS = (
    'input [{ name: "x" data_type: TYPE_INT32 dims: [1] }] output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]'
)


def parameter(execution: str) -> str:
    return f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}\n'


@pytest.mark.parametrize(
    ("config", "own", "inline"),
    [
        ("", "execution = 'inline'", True),
        (parameter("inline"), "pass", True),
        (parameter("inline"), "execution = 'process'", True),
        (parameter("thread"), "execution = 'inline'", False),
        ("", "pass", False),
    ],
)
async def test_where_it_runs(tmp_path: Path, config: str, own: str, inline: bool) -> None:
    async with serving(write(tmp_path, config, own, tells="threading.get_native_id()")) as here:
        (thread,) = await here.infer("m", np.zeros(1, np.int32))
        assert (thread == threading.get_native_id()) == inline


async def test_it_is_batched(tmp_path: Path) -> None:
    config = parameter("inline") + "max_batch_size: 8 dynamic_batching {}"
    own = "infer_batch = lambda self, inputs, calls: [{'y': np.full(1, len(calls), np.int32)} for _ in calls]"
    async with serving(write(tmp_path, config, own)) as here:
        answers = await asyncio.gather(*[here.infer("m", np.zeros(1, np.int32)) for _ in range(5)])
        assert [answer.tolist() for answer in answers] == [[5]] * 5


@pytest.mark.parametrize(
    ("config", "own", "code", "message"),
    [
        (
            parameter("inline") + "instance_group { count: 2 }",
            "pass",
            CODE,
            "config.pbtxt: parameters[execution]: expected another one than 'inline' for 2 instances",
        ),
        (
            parameter("inline") + "sequence_batching {}",
            "pass",
            CODE,
            "config.pbtxt: parameters[execution]: expected another one than 'inline' for a model with "
            "sequence_batching",
        ),
        ("", "execution = 'inline'; instances = 3", CODE, "model.py: ValueError: execution: expected another one"),
        (
            'backend: "python"\n' + TENSORS + parameter("inline"),
            "pass",
            TRITON,
            "model.py: parameters[execution]: expected thread or process for a TritonPythonModel",
        ),
    ],
)
async def test_what_cannot_be(
    tmp_path: Path, config: str, own: str, code: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelLoadError):
        async with serving(write(tmp_path, config, own, code=code)):
            pass
    assert message in caplog.text
