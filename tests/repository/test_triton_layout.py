"""Triton's model folders (spec 5.7): config.pbtxt, its version policy, and what a version's folder may hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository.scanning_server import ScanningServer, put
from triglot.model.config import ALL, LATEST, VersionPolicy
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.scanner import Scanner
from triglot.repository.scan.source import Found, ModelFiles, NothingFound, Override, find_models


def configure(folder: Path, text: str = "") -> None:
    put(folder / "config.pbtxt", text)


def found(*roots: Path) -> dict[str, list[ModelFiles]]:
    """What is there, and nothing is wrong."""
    scan = find_models(roots)
    assert not scan.problems
    return scan.models


def warnings_of(scan: Found) -> list[str]:
    """What is odd."""
    return [text for texts in scan.warnings.values() for text in texts]


def served(*roots: Path) -> dict[str, list[int]]:
    """The versions that a server takes at its start."""
    look = Scanner(0.0).scan(roots, {}, [], lambda _: True)
    return {name: list(versions) for name, versions in look.wanted.items()}


def problem(scan: Found) -> str:
    """The only thing that is wrong."""
    (error,) = scan.problems.values()
    return str(error)


# --- what a version's folder holds ---


@pytest.mark.parametrize(
    ("config", "path", "backend"),
    [
        ("", "model.onnx", "onnx"),
        ("", "model.py", "python"),
        ("", "model.savedmodel/saved_model.pb", "tensorflow"),
        ("", "saved_model.pb", "tensorflow"),
        ("", "model.onnx/model.onnx", "onnx"),
        ("", "model.pt", "torch"),
        ("", "model.pt2", "torch"),
        ("", "model.json", "xgboost"),
        ('platform: "onnxruntime_onnx"', "model.onnx", "onnx"),
        ('platform: "onnxruntime_onnx"', "model.onnx/model.onnx", "onnx"),
        ('backend: "onnxruntime"', "model.onnx", "onnx"),
        ('platform: "tensorflow_savedmodel"', "model.savedmodel/saved_model.pb", "tensorflow"),
        ('backend: "tensorflow"', "model.savedmodel/saved_model.pb", "tensorflow"),
        ('platform: "pytorch_libtorch"', "model.pt", "torch"),
        ('backend: "pytorch"', "model.pt", "torch"),
        ('backend: "python"', "model.py", "python"),
        # What the configuration calls the file.
        ('default_model_filename: "resnet.onnx"', "resnet.onnx", "onnx"),
        ('default_model_filename: "resnet.pt"', "resnet.pt", "torch"),
        ('default_model_filename: "main.py" backend: "python"', "main.py", "python"),
        ('default_model_filename: "weights.bin" backend: "onnxruntime"', "weights.bin", "onnx"),
        ('default_model_filename: "deep/er/model.onnx"', "deep/er/model.onnx", "onnx"),
        ('default_model_filename: "model.savedmodel"', "model.savedmodel/saved_model.pb", "tensorflow"),
        ('default_model_filename: "export"', "export/saved_model.pb", "tensorflow"),
        ('default_model_filename: "export" backend: "tensorflow"', "export/saved_model.pb", "tensorflow"),
        ('default_model_filename: "." platform: "tensorflow_savedmodel"', "saved_model.pb", "tensorflow"),
        ('default_model_filename: "graph.onnx"', "graph.onnx/model.onnx", "onnx"),
    ],
)
def test_the_file_of_a_version(tmp_path: Path, config: str, path: str, backend: str) -> None:
    folder = tmp_path / "m"
    configure(folder, config)
    file = put(folder / "1" / path)
    (files,) = found(tmp_path)["m"]
    assert (files.version, files.file, files.backend, files.folder) == (1, file, backend, folder / "1")
    assert files.config.source == str(folder / "config.pbtxt")
    # Without versions, too, and as a root of its own.
    shutil.move(folder / "1", tmp_path / "flat")
    shutil.copy(folder / "config.pbtxt", tmp_path / "flat")
    (files,) = found(tmp_path / "flat")["flat"]
    assert (files.version, files.file, files.backend) == (1, tmp_path / "flat" / path, backend)


@pytest.mark.parametrize("path", ["model.savedmodel/saved_model.pb", "model.onnx/model.onnx"])
def test_folders_in_place_of_files_need_no_configuration(tmp_path: Path, path: str) -> None:
    file = put(tmp_path / "m" / "1" / path)
    assert [files.file for files in found(tmp_path)["m"]] == [file]


def test_the_backend_decides_between_files(tmp_path: Path) -> None:
    for name in ("model.py", "model.onnx", "model.pt"):
        put(tmp_path / "m" / "1" / name)
    for backend, name in (("python", "model.py"), ("onnxruntime", "model.onnx"), ("pytorch", "model.pt")):
        configure(tmp_path / "m", f'backend: "{backend}"')
        assert [files.file.name for files in found(tmp_path)["m"]] == [name]


def test_a_file_that_is_named_for_no_backend(tmp_path: Path) -> None:
    configure(tmp_path / "m", 'default_model_filename: "weights.bin"')
    put(tmp_path / "m" / "1" / "weights.bin")
    assert problem(find_models([tmp_path / "m"])) == (
        f"{tmp_path / 'm' / 'config.pbtxt'}: backend: expected the backend of 'weights.bin', got none; "
        f"known backends: "
        "mlflow, predictor, python, mlserver, onnx, tensorflow, torch, sklearn, xgboost, lightgbm, catboost"
    )


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ('backend: "python"', "1/model.onnx", "model.py"),
        ('platform: "onnxruntime_onnx"', "1/model.py", "model.onnx, model.onnx/model.onnx"),
        (
            'default_model_filename: "other.onnx"',
            "1/model.onnx",
            "other.onnx, other.onnx/saved_model.pb, other.onnx/saved_model.pbtxt, other.onnx/model.onnx",
        ),
        ('backend: "python"', "0/model.py", "model.py"),
        ('backend: "python"', "01/model.py", "model.py"),
        ('backend: "python"', "latest/model.py", "model.py"),
    ],
)
def test_no_version_of_a_model(tmp_path: Path, config: str, file: str, expected: str) -> None:
    configure(tmp_path / "m", config)
    put(tmp_path / "m" / file)
    put(tmp_path / "good" / "model.py")
    scan = find_models([tmp_path])
    assert list(scan.models) == ["good"]
    assert problem(scan) == (
        f"{tmp_path / 'm'}: found config.pbtxt, but no version of the model; expected 1/{{{expected}}}"
    )
    assert isinstance(scan.problems[str(tmp_path / "m")], NothingFound)


# --- versions ---


@pytest.mark.parametrize("ignored", ["0", "01", "007", "-1", "+1", "v2", "1.0", "configs", "１", "9" * 20, "1 "])
def test_version_folders_that_triton_ignores(tmp_path: Path, ignored: str) -> None:
    folder = tmp_path / "m"
    for version in ("1", "7", ignored):
        put(folder / version / "model.py")
    configure(folder, "version_policy { all { } }")
    scan = find_models([tmp_path])
    assert [model.version for model in scan.models["m"]] == [1, 7]
    assert scan.problems == {}
    assert warnings_of(scan) == [
        f"{folder / ignored} is skipped: expected an integer like 1 as the version's name"
    ]


def test_other_entries_of_a_model_folder_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    configure(folder)
    for name in ("1/model.py", "model.json", "labels.txt", "warmup/one", "configs/other.pbtxt", "README.md"):
        put(folder / name)
    put(folder / "3" / "not yet a model")
    assert [files.file for files in found(tmp_path)["m"]] == [folder / "1" / "model.py"]


POLICIES = [
    ("", LATEST, [10]),
    ("version_policy { }", LATEST, [10]),
    ("version_policy { latest { num_versions: 2 } }", VersionPolicy(latest=2), [2, 10]),
    ("version_policy: { latest { num_versions: 9 } }", VersionPolicy(latest=9), [1, 2, 10]),
    ("version_policy { all { } }", ALL, [1, 2, 10]),
    ("version_policy { specific { versions: [1, 2, 4] } }", VersionPolicy(specific=frozenset({1, 2, 4})), [1, 2]),
]


@pytest.mark.parametrize(("config", "policy", "wanted"), POLICIES)
def test_the_version_policy(tmp_path: Path, config: str, policy: VersionPolicy, wanted: list[int]) -> None:
    for version in ("1", "2", "10"):
        put(tmp_path / "m" / version / "model.py")
        put(tmp_path / "plain" / version / "model.py")
    configure(tmp_path / "m", config)
    assert find_models([tmp_path]).policies == {"m": policy}
    assert served(tmp_path) == {"m": wanted, "plain": [1, 2, 10]}
    # What a list of models says counts for its models, and a config.pbtxt there does not.
    look = Scanner(0.0).scan([ModelSettings("m", tmp_path / "m", VersionPolicy(latest=2))], {}, [], lambda _: True)
    assert list(look.wanted["m"]) == [2, 10]


def test_policy_of_a_refused_model_is_ignored(tmp_path: Path) -> None:
    for version in ("1", "2"):
        put(tmp_path / "first" / "m" / version / "model.py")
    put(tmp_path / "second" / "m" / "1" / "model.py")
    configure(tmp_path / "second" / "m")
    scan = find_models([tmp_path / "first", tmp_path / "second"])
    assert scan.policies == {}
    assert list(scan.problems) == [str(tmp_path / "second" / "m")]


def test_versions_that_are_missing(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    configure(tmp_path / "m", "version_policy { specific { versions: [4, 1, 3] } }")
    assert warnings_of(find_models([tmp_path])) == [
        f"m: version_policy: versions 3, 4 not found in {tmp_path / 'm'}"
    ]


@pytest.mark.parametrize(("config", "expected"), [('backend: "python"', "model.py"), ("", "MLmodel, ")])
def test_a_version_without_its_file(tmp_path: Path, config: str, expected: str) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    put(tmp_path / "m" / "2" / "resnet.onnx")
    configure(tmp_path / "m", config)
    scan = find_models([tmp_path])
    assert [model.version for model in scan.models["m"]] == [1]
    (warning,) = warnings_of(scan)
    assert warning.startswith(f"{tmp_path / 'm' / '2'} is skipped: it contains no model, expected {{{expected}")


# --- several models, and what is wrong with some ---

BROKEN = [
    "max_batch_size: {",
    "max_batch_size: -1",
    'name: "other"',
    "no_such_field: 1",
    'default_model_filename: "../good/1/model.py"',
    'default_model_filename: "/etc/passwd"',
    'output { name: "y" data_type: TYPE_INT32 dims: 1 label_filename: "../good/labels.txt" }',
    'output { name: "y" data_type: TYPE_INT32 dims: 1 label_filename: "missing.txt" }',
    "instance_group { count: -1 }",
    "\0",
    "\ud800",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_configuration_leaves_the_other_models(tmp_path: Path, text: str) -> None:
    for name in ("a", "m", "z"):
        put(tmp_path / name / "1" / "model.py")
    put(tmp_path / "good" / "labels.txt")
    (tmp_path / "m" / "config.pbtxt").write_bytes(text.encode(errors="surrogatepass"))
    scan = find_models([tmp_path])
    assert list(scan.models) == ["a", "z"]
    assert list(scan.problems) == [str(tmp_path / "m")]
    assert str(tmp_path / "m" / "config.pbtxt") in problem(scan)


@given(st.binary(max_size=60) | st.text("{}:[]\"' \n<>;,#az01-", max_size=60).map(str.encode))
def test_no_configuration_takes_another_model_away(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    root = tmp_path_factory.mktemp("models")
    for name in ("a", "m", "z"):
        put(root / name / "1" / "model.py")
    (root / "m" / "config.pbtxt").write_bytes(text)
    scan = find_models([root])
    assert {"a", "z"} <= set(scan.models)
    assert ("m" in scan.models) != (str(root / "m") in scan.problems)


def test_a_configuration_that_is_no_file(tmp_path: Path) -> None:
    for name in ("folder", "pipe", "good"):
        put(tmp_path / name / "1" / "model.py")
    (tmp_path / "folder" / "config.pbtxt").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.pbtxt")
    scan = find_models([tmp_path])
    assert list(scan.models) == ["good"]
    assert {key: str(error) for key, error in scan.problems.items()} == {
        str(tmp_path / name): f"{tmp_path / name / 'config.pbtxt'}: expected a file" for name in ("folder", "pipe")
    }


def test_a_repository_of_one_broken_model_is_not_called_empty(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    configure(tmp_path / "m", "broken")
    assert list(find_models([tmp_path]).problems) == [str(tmp_path / "m")]


def test_one_name_in_two_repositories(tmp_path: Path) -> None:
    first, other = (put(tmp_path / root / "m" / "1" / "model.onnx") for root in ("one", "other"))
    put(tmp_path / "other" / "n" / "1" / "model.py")
    configure(tmp_path / "other" / "m", 'name: "m"')
    scan = find_models([tmp_path / "one", tmp_path / "other"])
    assert {name: versions[0].file for name, versions in scan.models.items()} == {
        "m": first,
        "n": tmp_path / "other" / "n" / "1" / "model.py",
    }
    assert problem(scan) == f"model 'm' appears in two or more repositories: {first} and {other}"


def test_a_load_request_s_configuration_stands_in_place_of_the_file(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    put(tmp_path / "m" / "2" / "model.py")
    put(tmp_path / "n" / "1" / "model.py")
    configure(tmp_path / "m", "broken")
    override = pb.ModelConfig(version_policy={"all": {}}, max_batch_size=3)
    scan = find_models([tmp_path], {"m": Override(override)})
    assert [model.config.max_batch_size for model in scan.models["m"]] == [3, 3]
    assert [model.config.max_batch_size for model in scan.models["n"]] == [0]
    assert not scan.problems
    hostile = pb.ModelConfig(default_model_filename="../../n/1/model.py")
    assert problem(find_models([tmp_path], {"m": Override(hostile)})) == (
        "the configuration in the request to load model 'm': default_model_filename: expected a path inside "
        f"{tmp_path / 'm' / 'VERSION'}, got '../../n/1/model.py'"
    )


# --- TensorFlow Serving's layout ---


def test_a_configuration_in_a_base_path_is_ignored(tmp_path: Path) -> None:
    for version in ("0", "1", "00000007"):
        put(tmp_path / version / "saved_model.pb")
    expected = [(number, tmp_path / name) for number, name in ((0, "0"), (1, "1"), (7, "00000007"))]
    for text in ("version_policy { specific { versions: 1 } } max_batch_size: 7", "broken", 'backend: "python"'):
        configure(tmp_path, text)
        scan = find_models([ModelSettings("m", tmp_path, ALL)])
        assert [(model.version, model.folder) for model in scan.models["m"]] == expected
        assert all(model.config.source == "" for model in scan.models["m"])
        assert (scan.problems, warnings_of(scan)) == ({}, [])


# --- a path that is one version, or its file (spec 5.7) ---


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
