"""The torch inferer and converter of grps projects where torch is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import grps_conf
import pytest
import yaml

from triglot.backends.grps.project import GrpsProject
from triglot.core.errors import MissingDependency
from triglot.telemetry.monitor import Monitor

INFERER = """
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class Same(ModelInferer):
    def init(self, path, device=None, args=None):
        pass

    def load(self):
        return True

    def infer(self, inp, context):
        return inp


inferer_register.register("same", Same())
"""

without_torch = pytest.mark.skipif(find_spec("torch") is not None, reason="this environment has torch")


@without_torch
@pytest.mark.parametrize(
    ("kind", "library"),
    [
        (kind, library)
        for kind in ("inferer_type", "converter_type")
        for library in ("torch", "tensorflow")
        if find_spec(library) is None
    ],
)
def test_the_error_says_what_to_install(tmp_path: Path, kind: str, library: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "customized_inferer.py").write_text(INFERER)
    entry = {
        "name": "m",
        "version": "1",
        "device": "cpu",
        "inferer_type": "customized",
        "inferer_name": "same",
        "inferer_path": "model",
        "converter_type": "none",
        kind: library,
    }
    inference = yaml.safe_dump({"models": [entry], "dag": grps_conf.DAG})
    project = GrpsProject(grps_conf.project(tmp_path, inference=inference), Monitor())
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            project.dag()
        text = f"{kind} {library} needs {library}, which is not installed; run: pip install {library}"
        assert str(caught.value).endswith(text)
    assert not [name for name in sys.modules if name.startswith(f"triglot.backends.grps.{library}")]
