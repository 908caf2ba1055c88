"""TensorFlow Serving's own client package, unmodified, against servers of SavedModels: one test per check."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.client_scripts import CLIENTS, RUN_SECONDS, ClientScript, ReportOf, script_tests
from tests.e2e.server_process import ServerProcess
from tests.process import outcome, start_python, write_model

# The servers and the clients have libraries of their own: another environment of these tests changes nothing.
pytestmark = pytest.mark.newest

CHECKS = ("tfs_predict.py", "tfs_examples.py", "tfs_manage.py")
SCRIPTS = [ClientScript("tensorflow", "tfs_client.py", (kind,), CHECKS) for kind in ("grpc", "grpc.aio")]
SQUARE = """
import tensorflow as tf
import triglot

class Square(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": tf.square(inputs["x"]).numpy()}
"""


@pytest.fixture(scope="module")
def report(tensorflow_server: ServerProcess, empty_server: ServerProcess, models: Path) -> ReportOf:
    """What a client script found; it runs when it is first asked for."""
    return cache(lambda script: script.run(tensorflow_server, empty_server.grpc_address, str(models)))


test_check, test_every_check_is_reported_in_order = script_tests(*SCRIPTS)


@pytest.mark.parametrize("first", ["client", "server"])
def test_client_and_server_in_one_process(first: str, tensorflow: Path, models: Path, tmp_path: Path) -> None:
    """With a model that imports TensorFlow itself, too."""
    write_model(tmp_path / "square", SQUARE)
    paths = CLIENTS / "tfs_one_process.py", first, models / "half_plus_three", tmp_path / "square"
    arguments = list(map(str, paths))
    done = outcome(start_python(arguments, tensorflow), RUN_SECONDS)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
