"""A call loads a model on demand only if its client may use that model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.access.access_files import client, write
from tests.process import write_model
from triglot import testing
from triglot.core.errors import Code, ServingError
from triglot.inline import ServedAt

MODEL = """
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def load(self, folder):
        (folder / "loaded").touch()

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""
TOKEN = "token-of-friend"
X = {"x": np.ones(1, np.float32)}


@pytest.mark.parametrize("client_class", testing.CLIENTS.values(), ids=testing.CLIENTS)
def test_model_of_others_is_not_loaded(tmp_path: Path, client_class: Callable[..., testing.Client]) -> None:
    repository = tmp_path / "models"
    for name in ("own", "secret"):
        write_model(repository / name, MODEL)
    access = write(tmp_path / "access.toml", client("friend", [TOKEN], ["infer", "metadata"], models='["own"]'))

    def call(server: ServedAt, model: str) -> None:
        with client_class(server, headers={"Authorization": f"Bearer {TOKEN}"}) as caller:
            caller.infer(model, X)

    with testing.serve(repository, load_on_demand=True, access=str(access)) as server:
        with pytest.raises(ServingError) as caught:
            call(server, "secret")
        assert caught.value.code is Code.PERMISSION_DENIED
        call(server, "own")
    assert [(repository / name / "loaded").exists() for name in ("own", "secret")] == [True, False]
