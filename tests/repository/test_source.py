"""From paths on disk to the models that are wanted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triglot.model.config import ALL, VersionPolicy
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.layout import BACKEND_OF_FILE, BACKEND_OF_SUFFIX
from triglot.repository.scan.source import ModelFiles, NamedPath, Root, find_models, version_of

NAMES = (
    "MLmodel, predictor.toml, model.py, model-settings.json, model.onnx, saved_model.pb, saved_model.pbtxt, "
    "model.pt2, model.pt, model.joblib, model.pkl, model.pickle, model.bst, model.ubj, model.json, model.txt, "
    "model.lgb, model.cbm"
)
FILES = f"{{{NAMES}}}"


def put(*files: Path) -> None:
    """Empty files: nothing here looks into them."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def found(*roots: Root) -> dict[str, list[tuple[int, str, Path]]]:
    """What is there, and nothing is wrong."""
    scan = find_models(roots)
    assert not scan.problems
    return {
        name: [(files.version, files.backend, files.file) for files in versions]
        for name, versions in scan.models.items()
    }


def warnings_of(*roots: Root) -> list[str]:
    """What is odd."""
    return [text for texts in find_models(roots).warnings.values() for text in texts]


def error_of(*roots: Root) -> str:
    """The first of what is wrong."""
    return str(next(iter(find_models(roots).problems.values())))


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
    assert list(found(tmp_path)) == ["C-1_x.y", "a", "b"]


@pytest.mark.parametrize(("file", "backend"), BACKEND_OF_FILE.items())
def test_a_model_folder(tmp_path: Path, file: str, backend: str) -> None:
    folder = tmp_path / "mine"
    put(folder / file)
    if file.endswith(".json"):
        (folder / file).write_text("{}")
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


@pytest.mark.parametrize(("suffix", "backend"), BACKEND_OF_SUFFIX.items())
def test_a_model_file_of_another_name(tmp_path: Path, suffix: str, backend: str) -> None:
    file = tmp_path / f"mine{suffix}"
    put(file)
    assert found(file) == {"mine": [(1, backend, file)]}


@pytest.mark.parametrize(
    ("files", "backend"),
    [
        (("model.py", "model.onnx"), "python"),
        (("predictor.toml", "model.py", "model.joblib"), "predictor"),
        (("model.json", "model.bst", "model.joblib"), "sklearn"),
        (("model.json", "saved_model.pb"), "tensorflow"),
        (("saved_model.pbtxt", "model.pt"), "tensorflow"),
        (("model.json", "notes.json"), "xgboost"),
    ],
)
def test_of_several_files_the_first_of_the_table_counts(
    tmp_path: Path, files: tuple[str, ...], backend: str
) -> None:
    put(*(tmp_path / "mine" / file for file in files))
    assert [model_backend for _, model_backend, _ in found(tmp_path)["mine"]] == [backend]


def test_a_saved_model_under_its_version(tmp_path: Path) -> None:
    file = tmp_path / "half_plus_two" / "00000123" / "saved_model.pb"
    put(file)
    for path in (tmp_path, file.parent.parent, file):
        assert found(path) == {"half_plus_two": [(123, "tensorflow", file)]}


def test_several_paths_are_one_repository(tmp_path: Path) -> None:
    put(tmp_path / "r" / "a" / "model.py", tmp_path / "one" / "model.py", tmp_path / "f.onnx")
    assert list(found(tmp_path / "r", tmp_path / "one", tmp_path / "f.onnx")) == ["a", "one", "f"]


def test_a_relative_path_is_called_as_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "mine" / "model.py")
    assert list(found(Path(os.path.relpath(tmp_path / "mine")))) == ["mine"]


def test_path_with_dots_is_named_after_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "mine" / "model.py", tmp_path / "mine" / "deep" / "notes.txt")
    assert list(found(tmp_path / "mine" / "deep" / "..")) == ["mine"]


def test_the_text_of_a_version() -> None:
    assert str(ModelFiles("name", 3, "python", Path("model.py"))) == "name version 3"


# --- what is passed over ---


@pytest.mark.parametrize("ignored", ["-1", "+1", "v1", "1.0", "latest", "１", "9" * 20])
def test_folders_that_are_no_versions(tmp_path: Path, ignored: str) -> None:
    folder = tmp_path / "mine"
    put(folder / "2" / "model.py", folder / ignored / "model.py", folder / ".saved" / "model.py")
    put(folder / "weights" / "part.bin")
    assert [version for version, _, _ in found(folder)["mine"]] == [2]
    assert warnings_of(folder) == [
        f"{folder / ignored} is skipped: expected an integer like 1 as the version's name"
    ]


def test_a_version_folder_without_a_model(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    put(mine / "1" / "model.py", mine / "2" / "modell.py", mine / "3", mine / "five" / "a")
    (mine / "4").mkdir()
    (mine / "6").symlink_to(mine / "6")
    assert [version for version, _, _ in found(tmp_path)["mine"]] == [1]
    expected = (
        f"{NAMES}, model.savedmodel/saved_model.pb, model.savedmodel/saved_model.pbtxt, model.onnx/model.onnx"
    )
    for root in (tmp_path, mine, ModelSettings("mine", mine, ALL)):
        assert warnings_of(root) == [
            f"{mine / version} is skipped: it contains no model, expected {{{expected}}}"
            for version in ("2", "4", "6")
        ]


def test_numbers_that_are_no_versions(tmp_path: Path) -> None:
    """Names of models, and what belongs to one."""
    put(tmp_path / "1" / "1" / "model.py", tmp_path / "mine" / "model.py", tmp_path / "mine" / "7" / "weights")
    assert list(found(tmp_path)) == ["1", "mine"]
    assert warnings_of(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("0", 0),
        ("1", 1),
        ("00000123", 123),
        (str(2**63 - 1), 2**63 - 1),
        (f"00{2**63 - 1}", 2**63 - 1),
        (str(2**63), None),
        ("9" * 5000, None),
        ("0" * 5000, 0),
        ("0" * 5000 + "7", 7),
        ("1e3", None),
    ],
)
def test_the_version_of_a_folder(name: str, version: int | None) -> None:
    assert version_of(name) == version


def test_two_spellings_of_one_version(tmp_path: Path) -> None:
    put(*(tmp_path / "mine" / spelling / "model.py" for spelling in ("007", "7", "07", "8")))
    scan = find_models([tmp_path])
    assert [files.file.parent.name for files in scan.models["mine"]] == ["7", "8"]
    left_out = [tmp_path / "mine" / spelling for spelling in ("07", "007")]
    assert warnings_of(tmp_path) == [
        f"{folder} is skipped: {tmp_path / 'mine' / '7'} is also version 7" for folder in left_out
    ]


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


def test_missing_path(tmp_path: Path) -> None:
    put(tmp_path / "good" / "model.py")
    missing = tmp_path / "missing"
    assert error_of(tmp_path, missing) == f"{missing}: no such file or folder"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    put(tmp_path / "notes.txt")
    assert error_of(tmp_path / "notes.txt") == (
        f"{tmp_path / 'notes.txt'}: expected a folder, one of {NAMES}, or NAME with one of .py, .onnx, .pt2, .pt, "
        ".joblib, .pkl, .pickle, .bst, .ubj, .lgb, .cbm"
    )


@pytest.mark.parametrize("file", ["", "notes.txt", "1/weights.bin"])
def test_a_folder_without_models(tmp_path: Path, file: str) -> None:
    if file:
        put(tmp_path / file)
    assert error_of(tmp_path) == f"{tmp_path}: no models here; expected NAME/[VERSION/]{FILES}"


@pytest.mark.parametrize("name", ["two words", "a:b", "ä", "a%20b", "a,b", "x" * 129])
def test_names_that_clients_could_not_send(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "repository" / name
    put(folder / "model.py")
    assert error_of(folder).startswith(f"{folder}: {name!r} is not a valid model name; expected 1 to 128 letters")
    # In a repository it is none, and may be anything else.
    put(tmp_path / "repository" / "good" / "model.py")
    (folder / "config.pbtxt").write_text("broken")
    assert list(found(tmp_path / "repository")) == ["good"]
    (warning,) = warnings_of(tmp_path / "repository")
    assert warning.startswith(
        f"{folder} is skipped: {name!r} is not a valid model name; expected 1 to 128 letters"
    )


def test_the_longest_name(tmp_path: Path) -> None:
    put(tmp_path / ("x" * 128) / "model.py")
    assert list(found(tmp_path)) == ["x" * 128]


def test_one_name_in_two_places(tmp_path: Path) -> None:
    first, other = tmp_path / "one" / "same" / "model.py", tmp_path / "other" / "same" / "1" / "model.onnx"
    put(first, other)
    expected = f"model 'same' appears in two or more repositories: {first} and {other}"
    assert error_of(tmp_path / "one", tmp_path / "other") == expected
    assert error_of(first, tmp_path / "other") == expected
    assert "'same' appears in two or more" in error_of(tmp_path / "one", tmp_path / "one")


@pytest.mark.parametrize("bad", [("odd/1/model.py", "odd/config.pbtxt/x"), ("both/model.py", "both/1/model.py")])
def test_one_wrong_model_leaves_the_others(tmp_path: Path, bad: tuple[str, ...]) -> None:
    put(tmp_path / "a" / "model.py", tmp_path / "z" / "model.py")
    put(*(tmp_path / "r" / file for file in bad))
    scan = find_models([tmp_path / "a", tmp_path / "r", tmp_path / "z", tmp_path / "gone"])
    assert list(scan.models) == ["a", "z"]
    assert str(tmp_path / "gone") in scan.problems
    assert any(problem.startswith(str(tmp_path / "r")) for problem in scan.problems)
    # Such a repository is not called empty.
    assert str(tmp_path / "r") not in scan.problems


# --- what a configuration says of a model ---


def test_the_versions_below_a_base_path(tmp_path: Path) -> None:
    put(*(tmp_path / version / "saved_model.pb" for version in ("00000123", "7", "0", "notes", "-3")))
    put(tmp_path / "8" / "half.txt", tmp_path / "9", tmp_path / "model.json")
    assert found(ModelSettings("mine", tmp_path, ALL)) == {
        "mine": [
            (0, "tensorflow", tmp_path / "0" / "saved_model.pb"),
            (7, "tensorflow", tmp_path / "7" / "saved_model.pb"),
            (123, "tensorflow", tmp_path / "00000123" / "saved_model.pb"),
        ]
    }


def test_one_base_path_for_two_models(tmp_path: Path) -> None:
    put(tmp_path / "1" / "model.py")
    both = found(ModelSettings("a", tmp_path), ModelSettings("b", tmp_path))
    assert both == {name: [(1, "python", tmp_path / "1" / "model.py")] for name in ("a", "b")}


def test_missing_base_path(tmp_path: Path) -> None:
    put(tmp_path / "good" / "1" / "model.py")
    scan = find_models([ModelSettings("bad", tmp_path / "bad"), ModelSettings("good", tmp_path / "good")])
    assert list(scan.models) == ["good"]
    assert {name: str(error) for name, error in scan.problems.items()} == {
        "bad": f"Could not find base path {tmp_path / 'bad'} for servable bad"
    }


def test_any_number_of_versions_that_are_missing(tmp_path: Path) -> None:
    put(tmp_path / "1" / "model.py")
    (warning,) = warnings_of(ModelSettings("mine", tmp_path, VersionPolicy(specific=frozenset(range(1, 100_000)))))
    first = ", ".join(map(str, range(2, 26)))
    assert warning == f"mine: version_policy: versions {first} and 99974 more not found in {tmp_path}"
    missing = ModelSettings("mine", tmp_path, VersionPolicy(specific=frozenset(range(2, 100_000))))
    assert len(error_of(missing)) < 1000


@pytest.mark.parametrize("version", ["", "1"])
def test_a_base_path_without_versions(tmp_path: Path, version: str) -> None:
    put(tmp_path / version / "notes.txt")
    text = f"No versions of servable mine found under base path {tmp_path}, expected VERSION/{FILES}"
    assert error_of(ModelSettings("mine", tmp_path)) == text


def test_specific_versions_that_are_missing(tmp_path: Path) -> None:
    put(tmp_path / "1" / "model.py", tmp_path / "2" / "model.py")
    model = ModelSettings("mine", tmp_path, VersionPolicy(specific=frozenset({3, 2, 9})))
    assert warnings_of(model) == [f"mine: version_policy: versions 3, 9 not found in {tmp_path}"]
    assert not find_models([model]).problems
    missing = ModelSettings("mine", tmp_path, VersionPolicy(specific=frozenset({3})))
    assert error_of(missing).startswith("No versions of servable mine found")


# --- names that are given ---


def test_a_name_for_what_lies_directly_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    put(folder / "model.joblib")
    named = NamedPath("iris", folder)
    assert found(named) == {"iris": [(1, "sklearn", folder / "model.joblib")]}
    assert find_models([named]).folders == {"iris": folder}
    # With its file, too.
    assert found(NamedPath("iris", folder / "model.joblib")) == found(named)


def test_a_name_for_numbered_folders(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    put(folder / "0001" / "saved_model.pb", folder / "2" / "saved_model.pb")
    expected = [(1, "tensorflow", folder / "0001" / "saved_model.pb")]
    expected += [(2, "tensorflow", folder / "2" / "saved_model.pb")]
    assert found(NamedPath("flowers", folder)) == {"flowers": expected}


def test_a_name_for_the_only_file(tmp_path: Path) -> None:
    put(tmp_path / "iris.joblib", tmp_path / "README.md", tmp_path / ".cache" / "model.py")
    assert found(NamedPath("flowers", tmp_path)) == {"flowers": [(1, "sklearn", tmp_path / "iris.joblib")]}
    assert "no models here" in error_of(tmp_path)
    put(tmp_path / "other.joblib")
    assert "no models here" in error_of(NamedPath("flowers", tmp_path))


def test_the_models_of_a_repository_keep_their_names(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1" / "model.onnx", tmp_path / "b" / "model.py", tmp_path / "download.py")
    named = NamedPath("mine", tmp_path)
    assert list(found(named)) == ["a", "b"]
    text = f"{tmp_path} is a repository, whose models keep their names; the name 'mine' is not used"
    assert warnings_of(named) == [text]


def test_a_name_in_place_of_the_one_in_the_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    put(folder / "1" / "model.onnx", folder / "versions.toml")
    (folder / "config.pbtxt").write_text('name: "resnet" version_policy { specific { versions: [1] } }')
    (folder / "versions.toml").write_text("[versions]\nstable = 1\n")
    named = find_models([NamedPath("mine", folder)])
    assert list(named.models) == ["mine"]
    assert not named.problems
    assert named.names["mine"].numbers == {"stable": 1}
    assert named.policies["mine"].specific == frozenset({1})
    assert "expected the folder's name, 'models', got 'resnet'" in error_of(folder)
    assert list(find_models([NamedPath("mine", folder / "1")]).models) == ["mine"]


def test_one_name_for_two_paths(tmp_path: Path) -> None:
    put(tmp_path / "a" / "model.py", tmp_path / "b" / "model.py")
    assert "model 'm' appears in two or more" in error_of(
        NamedPath("m", tmp_path / "a"), NamedPath("m", tmp_path / "b")
    )
