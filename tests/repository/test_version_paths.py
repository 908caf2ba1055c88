"""A path that is one version of a model with a config.pbtxt, or its file (spec 5.7)."""

from __future__ import annotations

from pathlib import Path

import pytest
from scanning_server import ScanningServer, put

from triglot.repository.scan.source import find_models


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ("", "1/model.onnx"),
        ("", "1/model.savedmodel/saved_model.pb"),
        ('default_model_filename: "resnet.onnx"', "1/resnet.onnx"),
        ('default_model_filename: "deep/er/model.onnx"', "1/deep/er/model.onnx"),
    ],
)
def test_the_path_of_a_version_is_one_of_its_model(tmp_path: Path, config: str, path: str) -> None:
    """Whatever the policy; its configuration counts."""
    file = put(tmp_path / "m" / path)
    put(tmp_path / "m" / "2" / "model.onnx")
    put(
        tmp_path / "m" / "config.pbtxt",
        f"{config} max_batch_size: 4 version_policy {{ specific {{ versions: 2 }} }}",
    )
    for root in (file, tmp_path / "m" / "1"):
        scan = find_models([root])
        assert not scan.problems
        assert [(model.version, model.file) for model in scan.models["m"]] == [(1, file)]
        assert scan.models["m"][0].config.max_batch_size == 4
        assert scan.folders == {"m": tmp_path / "m"}
        assert ScanningServer(root).versions() == {"m": [1]}
    put(tmp_path / "m" / "config.pbtxt", "max_batch_size: -1")
    assert "max_batch_size: expected" in str(find_models([file]).problems[str(file)])


def test_a_model_and_one_of_its_versions(tmp_path: Path) -> None:
    for version in ("1", "2"):
        put(tmp_path / "m" / version / "model.onnx")
    put(tmp_path / "m" / "config.pbtxt")
    assert ScanningServer(tmp_path, tmp_path / "m" / "1").versions() == {"m": [2]}
    (problem,) = find_models([tmp_path, tmp_path / "m" / "1"]).problems.values()
    assert "'m' appears in two or more repositories" in str(problem)


@pytest.mark.parametrize("path", ["1/other.onnx", "01/model.onnx", "latest/model.onnx"])
def test_path_of_another_file_next_to_a_configuration(tmp_path: Path, path: str) -> None:
    file = put(tmp_path / "m" / path)
    put(tmp_path / "m" / "1" / "model.onnx")
    put(tmp_path / "m" / "config.pbtxt", "max_batch_size: 4")
    ((files,),) = find_models([file]).models.values()
    assert (files.file, files.config.max_batch_size) == (file, 0)
