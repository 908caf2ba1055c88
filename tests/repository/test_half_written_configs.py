"""A configuration, and the files that it names, that are written slowly or changed in place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository.scanning_server import ScanningServer, a_repository, put, replace

ONE = "version_policy { specific { versions: 1 } }"
ALL = "version_policy { all { } }"


@pytest.mark.parametrize("name", ["labels.txt", "warmup/one"])
def test_files_that_the_configuration_names(tmp_path: Path, name: str) -> None:
    root = a_repository(tmp_path)
    put(root / "m" / "labels.txt", "cat")
    put(root / "m" / "warmup" / "one", "0000")
    put(
        root / "m" / "config.pbtxt",
        ALL + ' output { name: "y" data_type: TYPE_INT32 dims: 1 label_filename: "labels.txt" } max_batch_size: 1 '
        'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_INT32 dims: 1 '
        'input_data_file: "one" } } }',
    )
    scanning = ScanningServer(root)
    assert scanning.loads == ["m/1", "m/2"]
    put(root / "m" / "README.md", "not named")
    scanning.look()
    scanning.look()
    assert scanning.loads == ["m/1", "m/2"]
    put(root / "m" / name, "dog!!")
    assert scanning.look().unsettled
    scanning.look()
    scanning.look()
    assert scanning.loads == ["m/1", "m/2", "m/1", "m/2"]
    (root / "m" / name).unlink()
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"m": [1, 2]}
    assert "expected a file" in str(scanning.last.problems[str(root / "m")])


@given(
    old=st.sampled_from(["", ALL, ONE]),
    new=st.sampled_from([ALL + " max_batch_size: 12 # the end", ONE + " max_batch_size: 34", "# nothing"]),
    steps=st.lists(st.integers(0, 80), max_size=6).map(sorted),
)
def test_a_configuration_that_is_written_slowly(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str, steps: list[int]
) -> None:
    """Whatever its beginning says, the serving version continues until the whole has been seen twice."""
    root = a_repository(tmp_path_factory.mktemp("models"))
    config = root / "m" / "config.pbtxt"
    if old:
        put(config, old)
    scanning = ScanningServer(root)
    before = scanning.last.wanted
    for end in dict.fromkeys([*steps, len(new)]):
        put(config, new[:end])
        scanning.look()
        assert scanning.last.wanted == before
    scanning.look()
    expected = ScanningServer(root)
    assert scanning.versions() == expected.versions()
    assert [files.config for files in scanning.last.wanted["m"].values()] == [
        files.config for files in expected.last.wanted["m"].values()
    ]


def test_a_policy_that_moves_to_another_version_leaves_no_gap(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    put(root / "m" / "config.pbtxt")
    scanning = ScanningServer(root)
    assert scanning.versions() == {"m": [2]}
    replace(root / "m" / "config.pbtxt", ONE)
    assert scanning.look().unsettled
    assert scanning.versions() == {"m": [2]}
    assert not scanning.look().unsettled
    assert scanning.versions() == {"m": [1]}


def test_configuration_is_added_and_removed(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    scanning = ScanningServer(root)
    assert scanning.versions() == {"m": [1, 2]}
    put(root / "m" / "config.pbtxt", "max_batch_size: 4")
    scanning.look()
    assert scanning.versions() == {"m": [1, 2]}
    scanning.look()
    assert scanning.versions() == {"m": [2]}
    assert scanning.last.wanted["m"][2].config.max_batch_size == 4
    # An editor that is about to write it again.
    (root / "m" / "config.pbtxt").unlink()
    scanning.look()
    assert scanning.versions() == {"m": [2]}
    put(root / "m" / "config.pbtxt", "max_batch_size: 4 # as before")
    scanning.look()
    scanning.look()
    assert scanning.loads == ["m/1", "m/2", "m/2"]
    (root / "m" / "config.pbtxt").unlink()
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"m": [1, 2]}
    assert scanning.last.wanted["m"][2].config.max_batch_size == 0
    assert scanning.loads == ["m/1", "m/2", "m/2", "m/1", "m/2"]


def test_a_configuration_that_breaks_keeps_what_served(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    put(root / "other" / "1" / "model.py")
    put(root / "m" / "config.pbtxt", ONE)
    scanning = ScanningServer(root)
    for text in ("max_batch_size: {", "version_policy { specific { versions: [1, ", 'name: "n"'):
        put(root / "m" / "config.pbtxt", text)
        for _ in range(2):
            scanning.look()
            assert scanning.versions() == {"other": [1], "m": [1]}
            assert str(root / "m" / "config.pbtxt") in str(scanning.last.problems[str(root / "m")])
    put(root / "m" / "config.pbtxt", ONE)
    scanning.look()
    scanning.look()
    assert scanning.loads == ["m/1", "other/1"]
    assert not scanning.last.problems


def test_a_policy_that_wants_more_loads_no_more_than_that(tmp_path: Path) -> None:
    for version in ("1", "2"):
        put(tmp_path / "m" / version / "model.py")
    config = put(tmp_path / "m" / "config.pbtxt")
    scanning = ScanningServer(tmp_path)
    config.write_text("version_policy { all {} }")
    for _ in range(3):
        scanning.look()
    assert scanning.versions() == {"m": [1, 2]}
    assert scanning.loads == ["m/2", "m/1"]


def test_comments_in_a_configuration_load_nothing_again(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    put(root / "m" / "config.pbtxt", ONE)
    scanning = ScanningServer(root)
    put(root / "m" / "config.pbtxt", f"# The first one, for now.\n{ONE}")
    for _ in range(3):
        scanning.look()
    assert scanning.loads == ["m/1"]


def test_configured_model_without_versions_is_removed(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    put(root / "m" / "config.pbtxt", ALL)
    put(root / "other" / "1" / "model.py")
    scanning = ScanningServer(root)
    for version in ("1", "2"):
        shutil.rmtree(root / "m" / version)
    scanning.look()
    assert scanning.versions() == {"other": [1]}
