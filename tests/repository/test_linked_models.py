"""Models, files of models and whole repositories behind symbolic links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.repository.links_on_disk import link, put
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.scanner import Scanner
from triglot.repository.scan.source import Found, Root, find_models

LABELS = 'output { name: "y" data_type: TYPE_INT32 dims: 1 label_filename: "labels.txt" }'
WARM_UP = """
max_batch_size: 1
model_warmup {
  name: "one" batch_size: 1
  inputs { key: "x" value { data_type: TYPE_INT32 dims: 1 input_data_file: "one" } }
}
"""


def a_model_folder(repository: Path, outside: Path) -> None:
    put(outside / "1" / "model.py")
    link(repository / "out", outside)


def a_model_folder_up_and_down(repository: Path, outside: Path) -> None:
    put(outside / "1" / "model.py")
    link(repository / "out", f"../{repository.name}/../{outside.name}")


def a_version_folder(repository: Path, outside: Path) -> None:
    put(outside / "model.py")
    link(repository / "out" / "1", outside)


def a_model_file(repository: Path, outside: Path) -> None:
    put(outside / "model.py")
    link(repository / "out" / "1" / "model.py", outside / "model.py")


def a_neighbour_file(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py", outside / "secret")
    link(repository / "out" / "1" / "weights", outside / "secret")


def a_missing_neighbour_file(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py")
    link(repository / "out" / "1" / "weights", outside / "to come")


def a_file_one_level_deeper(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "saved_model.pb", repository / "out" / "1" / "variables" / "variables.index")
    put(outside / "data")
    link(repository / "out" / "1" / "variables" / "variables.data", outside / "data")


def a_file_in_a_hidden_folder_far_below(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py", outside / "secret")
    put(repository / "out" / "1" / "a" / ".b" / "__pycache__" / "file")
    link(repository / "out" / "1" / "a" / ".b" / "__pycache__" / "weights", outside / "secret")


def a_file_in_a_linked_folder(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py", outside / "secret")
    link(repository / "out" / "1" / "data", "../data")
    link(repository / "out" / "data" / "secret", outside / "secret")


def a_file_of_a_model_without_versions(repository: Path, outside: Path) -> None:
    put(repository / "out" / "model.py", outside / "secret")
    link(repository / "out" / "weights", outside / "secret")


def a_configuration(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py")
    put(outside / "config.pbtxt", text="max_batch_size: 1")
    link(repository / "out" / "config.pbtxt", outside / "config.pbtxt")


def a_label_file(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py", outside / "passwd")
    put(repository / "out" / "config.pbtxt", text=LABELS)
    link(repository / "out" / "labels.txt", outside / "passwd")


def a_warm_up_file(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py", outside / "data")
    put(repository / "out" / "config.pbtxt", text=WARM_UP)
    link(repository / "out" / "warmup" / "one", outside / "data")


def a_warm_up_folder(repository: Path, outside: Path) -> None:
    put(repository / "out" / "1" / "model.py", outside / "one")
    put(repository / "out" / "config.pbtxt", text=WARM_UP)
    link(repository / "out" / "warmup", outside)


def a_default_model_file(repository: Path, outside: Path) -> None:
    put(outside / "other.onnx")
    put(repository / "out" / "config.pbtxt", text='default_model_filename: "other.onnx"')
    link(repository / "out" / "1" / "other.onnx", outside / "other.onnx")


def a_folder_in_place_of_a_file(repository: Path, outside: Path) -> None:
    put(outside / "saved_model.pb")
    put(repository / "out" / "config.pbtxt", text='platform: "tensorflow_savedmodel"')
    link(repository / "out" / "1" / "model.savedmodel", outside)


LEADING_OUT = [
    a_model_folder,
    a_model_folder_up_and_down,
    a_version_folder,
    a_model_file,
    a_neighbour_file,
    a_missing_neighbour_file,
    a_file_one_level_deeper,
    a_file_in_a_hidden_folder_far_below,
    a_file_in_a_linked_folder,
    a_file_of_a_model_without_versions,
    a_configuration,
    a_label_file,
    a_warm_up_file,
    a_warm_up_folder,
    a_default_model_file,
    a_folder_in_place_of_a_file,
]
Make = Callable[[Path, Path], None]


@pytest.mark.parametrize("make", LEADING_OUT)
def test_links_that_lead_out_of_the_repository(tmp_path: Path, make: Make) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    outside.mkdir()
    put(root / "good" / "1" / "model.py")
    make(root, outside)
    refused = find_models([root])
    assert list(refused.models) == ["good"]
    (problem,) = refused.problems.values()
    assert f"a symbolic link leads out of {root}, to {outside}" in str(problem)
    allowed = find_models([root], allow_symlinks=True)
    assert (list(allowed.models), allowed.problems) == (["good", "out"], {})


@pytest.mark.parametrize("make", [layout for layout in LEADING_OUT if "model_folder" not in layout.__name__])
def test_the_same_of_one_model_s_folder(tmp_path: Path, make: Make) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    outside.mkdir()
    make(root, outside)
    refused = find_models([root / "out"])
    assert not refused.models
    assert "a symbolic link leads out of" in str(next(iter(refused.problems.values())))
    assert list(find_models([root / "out"], allow_symlinks=True).models) == ["out"]


def of_kubernetes(folder: Path) -> None:
    """A mounted ConfigMap: what is in it is behind one link that is replaced in one step."""
    put(folder / "..2026_01_01" / "config.pbtxt", text="max_batch_size: 1")
    put(folder / "..2026_01_01" / "1" / "model.py")
    link(folder / "..data", "..2026_01_01")
    for name in ("1", "config.pbtxt"):
        link(folder / name, f"..data/{name}")


def of_git_sync(folder: Path) -> None:
    """A link to the folder of a commit, in a folder beside."""
    put(folder.parent / ".worktrees" / "1f3a" / "1" / "model.py")
    link(folder, ".worktrees/1f3a")


def of_absolute_paths(folder: Path) -> None:
    put(folder.parent / ".store" / "model.py")
    link(folder / "1", folder.parent.absolute() / ".store")


@pytest.mark.parametrize("make", [of_kubernetes, of_git_sync, of_absolute_paths])
def test_links_within_the_repository(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "models" / "m")
    scan = find_models([tmp_path / "models"])
    assert (list(scan.models), scan.problems) == (["m"], {})
    assert scan.models["m"][0].file.read_text() == ""


@pytest.mark.parametrize("make", [of_kubernetes, of_git_sync, of_absolute_paths])
def test_a_root_that_is_a_link(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The model is called as the link that was given, wherever it leads."""
    make(tmp_path / "models" / "m")
    link(tmp_path / "other", tmp_path / "models")
    assert list(find_models([tmp_path / "other"]).models) == ["m"]
    link(tmp_path / "second", "other")
    assert list(find_models([tmp_path / "second"]).models) == ["m"]


def test_a_model_s_folder_that_is_a_link(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere" / "1" / "model.py", tmp_path / "file.onnx")
    link(tmp_path / "m", "elsewhere")
    link(tmp_path / "n.onnx", "file.onnx")
    put(tmp_path / "beside" / "model.py")
    link(tmp_path / "o" / "model.py", tmp_path / "beside" / "model.py")
    roots = [tmp_path / "m", tmp_path / "n.onnx", tmp_path / "o" / "model.py"]
    assert list(find_models(roots).models) == ["m", "n", "o"]
    # Whoever names a file does not say that its folder is a repository.
    link(tmp_path / "o" / "weights", tmp_path / "beside")
    assert not find_models(roots).problems


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    put(tmp_path / "good" / "model.py")
    link(tmp_path / "a", "a")
    link(tmp_path / "b" / "1", "1")
    link(tmp_path / "c" / "1" / "model.py", "model.py")
    link(tmp_path / "d" / "config.pbtxt", "config.pbtxt")
    link(tmp_path / "good" / "weights", "weights")
    put(tmp_path / "d" / "1" / "model.py")
    scan = find_models([tmp_path])
    assert list(scan.models) == ["good"]
    assert list(scan.problems) == [str(tmp_path / "d")]
    assert "config.pbtxt" in str(scan.problems[str(tmp_path / "d")])


def of_base_path(path: Path, *, allow_symlinks: bool = False) -> Found:
    models: list[Root] = [ModelSettings("m", path), ModelSettings("other", path.parent / "other")]
    return find_models(models, allow_symlinks=allow_symlinks)


@pytest.mark.parametrize("name", ["", "model.py", "variables/data"])
def test_a_base_path_is_a_root(tmp_path: Path, name: str) -> None:
    """TensorFlow Serving has no such flag: the text names the variable, too."""
    base_path, outside = tmp_path / "m", tmp_path / "outside"
    put(tmp_path / "other" / "1" / "model.py", outside / (name or "model.py"))
    put(*(base_path / "1" / "saved_model.pb" for _ in [0] if name))
    link(base_path / "1" / name, outside / name)
    refused = of_base_path(base_path)
    assert list(refused.models) == ["other"]
    assert str(refused.problems["m"]) == (
        f"{base_path / '1' / name}: a symbolic link leads out of {base_path}, to {outside / name}; "
        "--allow-symlinks, or TRIGLOT_ALLOW_SYMLINKS=true, allows that"
    )
    assert list(of_base_path(base_path, allow_symlinks=True).models) == ["m", "other"]


def test_a_base_path_that_is_a_link(tmp_path: Path) -> None:
    put(tmp_path / "exports" / "1" / "model.py", tmp_path / "other" / "1" / "model.py")
    link(tmp_path / "exports" / "2", "1")
    link(tmp_path / "m", "exports")
    scan = of_base_path(tmp_path / "m")
    assert [files.version for files in scan.models["m"]] == [1, 2]
    assert not scan.problems


def test_a_link_that_turns_away_keeps_what_served(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    put(root / "m" / "first" / "model.py", outside / "model.py")
    link(root / "m" / "1", "first")
    watch = Scanner(0.0)
    first = watch.scan([root], {}, [], lambda _: True)
    held = first.wanted["m"][1]
    (root / "m" / "1").unlink()
    link(root / "m" / "1", outside)
    for _ in range(3):
        look = watch.scan([root], first.wanted, [held])
        assert look.wanted == first.wanted
        assert "leads out of" in str(look.problems[str(root / "m")])
