"""From paths on disk to the models that are wanted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triglot.core.errors import ModelLoadError
from triglot.repository.source import ModelFiles, find_models


def put(*files: Path) -> None:
    """Empty files: nothing here looks into them."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def found(*paths: Path) -> dict[str, list[tuple[int, str, Path]]]:
    return {
        name: [(files.version, files.backend, files.file) for files in versions]
        for name, versions in find_models(paths).items()
    }


def error_of(*paths: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find_models(paths)
    return str(caught.value)


# --- the kinds of paths ---


def test_a_repository_folder(tmp_path: Path) -> None:
    files = {
        "b": tmp_path / "b" / "model.py",
        "a": tmp_path / "a" / "1" / "model.onnx",
        "C-1_x.y": tmp_path / "C-1_x.y" / "3" / "model.py",
    }
    put(*files.values())
    assert found(tmp_path) == {
        "C-1_x.y": [(3, "python", files["C-1_x.y"])],
        "a": [(1, "onnx", files["a"])],
        "b": [(1, "python", files["b"])],
    }
    assert list(find_models([tmp_path])) == ["C-1_x.y", "a", "b"]


@pytest.mark.parametrize(("file", "backend"), [("model.py", "python"), ("model.onnx", "onnx")])
def test_a_model_folder(tmp_path: Path, file: str, backend: str) -> None:
    folder = tmp_path / "mine"
    put(folder / file)
    assert found(folder) == {"mine": [(1, backend, folder / file)]}
    # A model file of the usual name is called as its folder.
    assert found(folder / file) == {"mine": [(1, backend, folder / file)]}


def test_a_model_folder_with_versions(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    put(folder / "10" / "model.py", folder / "2" / "model.onnx", folder / "1" / "model.py")
    assert found(folder) == {
        "mine": [
            (1, "python", folder / "1" / "model.py"),
            (2, "onnx", folder / "2" / "model.onnx"),
            (10, "python", folder / "10" / "model.py"),
        ]
    }


@pytest.mark.parametrize(("file", "backend"), [("resnet.onnx", "onnx"), ("my_model.py", "python")])
def test_a_model_file_of_another_name(tmp_path: Path, file: str, backend: str) -> None:
    put(tmp_path / file)
    name = file.partition(".")[0]
    assert found(tmp_path / file) == {name: [(1, backend, tmp_path / file)]}


def test_several_paths_are_one_repository(tmp_path: Path) -> None:
    put(tmp_path / "r" / "a" / "model.py", tmp_path / "one" / "model.py", tmp_path / "f.onnx")
    assert list(found(tmp_path / "r", tmp_path / "one", tmp_path / "f.onnx")) == ["a", "one", "f"]


def test_links_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere" / "model.py")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert list(found(tmp_path / "models")) == ["linked"]


def test_a_relative_path_is_called_as_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "mine" / "model.py")
    assert list(found(Path(os.path.relpath(tmp_path / "mine")))) == ["mine"]


def test_a_path_that_goes_up_is_called_as_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "mine" / "model.py", tmp_path / "mine" / "deep" / "notes.txt")
    assert list(found(tmp_path / "mine" / "deep" / "..")) == ["mine"]


def test_the_text_of_a_version() -> None:
    assert str(ModelFiles("name", 3, "python", Path("model.py"))) == "name version 3"


# --- what is passed over ---


@pytest.mark.parametrize("ignored", ["0", "01", "-1", "v1", "1.0", "latest", "１", "", "9" * 20])
def test_folders_that_are_no_versions(tmp_path: Path, ignored: str) -> None:
    folder = tmp_path / "mine"
    put(folder / "2" / "model.py")
    if ignored:
        put(folder / ignored / "model.py")
    assert [version for version, _, _ in found(folder)["mine"]] == [2]


def test_a_version_folder_without_a_model(tmp_path: Path) -> None:
    put(tmp_path / "mine" / "1" / "model.py", tmp_path / "mine" / "2" / "weights.bin", tmp_path / "mine" / "3")
    assert [version for version, _, _ in found(tmp_path)["mine"]] == [1]


def test_hidden_folders_plain_files_and_folders_without_models(tmp_path: Path) -> None:
    put(tmp_path / "good" / "model.py")
    put(tmp_path / ".git" / "model.py", tmp_path / ".ipynb_checkpoints" / "1" / "model.py")
    put(tmp_path / "README.md", tmp_path / "helper.py", tmp_path / "other.onnx")
    put(
        tmp_path / "docs" / "text.md",
        tmp_path / "__pycache__" / "helper.pyc",
        tmp_path / "nested" / "a" / "model.py",
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "model.py").mkdir(parents=True)
    assert list(found(tmp_path)) == ["good"]


# --- what is wrong ---


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    put(tmp_path / "good" / "model.py")
    missing = tmp_path / "missing"
    assert error_of(tmp_path, missing) == f"{missing}: no such file or folder"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    put(tmp_path / "model.pt")
    assert error_of(tmp_path / "model.pt") == f"{tmp_path / 'model.pt'}: expected a folder, a .py or an .onnx file"


@pytest.mark.parametrize("file", ["", "notes.txt", "1/weights.bin"])
def test_a_folder_without_models(tmp_path: Path, file: str) -> None:
    if file:
        put(tmp_path / file)
    assert error_of(tmp_path) == f"{tmp_path}: no models here; expected NAME/[VERSION/]{{model.py, model.onnx}}"


@pytest.mark.parametrize("name", ["two words", "a:b", "ä", "a%20b", "a,b", "x" * 129])
def test_names_that_clients_could_not_send(tmp_path: Path, name: str) -> None:
    put(tmp_path / "repository" / name / "model.py")
    for path in (tmp_path / "repository", tmp_path / "repository" / name):
        text = error_of(path)
        assert text.startswith(
            f"{path}: a file or folder gives a model the name {name!r}; expected 1 to 128 letters"
        )


def test_the_longest_name(tmp_path: Path) -> None:
    put(tmp_path / ("x" * 128) / "model.py")
    assert list(found(tmp_path)) == ["x" * 128]


def test_one_name_in_two_places(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "same" / "model.py", tmp_path / "other" / "same" / "1" / "model.onnx"
    put(one, other)
    expected = f"model 'same' appears in two or more repositories: {one} and {other}"
    assert error_of(tmp_path / "one", tmp_path / "other") == expected
    assert error_of(one, tmp_path / "other") == expected
    assert "'same' appears in two or more" in error_of(tmp_path / "one", tmp_path / "one")
