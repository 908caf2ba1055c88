"""What is copied slowly, or changed in place, is not taken before it is whole, and costs no call its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.repository.scanning_server import ScanningServer, a_repository, put, replace
from triglot.repository.config.settings import ModelSettings

ONE = "version_policy { specific { versions: 1 } }"
MODEL = {
    "config.pbtxt": 'platform: "tensorflow_savedmodel" output { name: "y" data_type: TYPE_FP32 dims: 1 '
    'label_filename: "labels.txt" }',
    "labels.txt": "cat\ndog\n",
    "1/model.savedmodel/saved_model.pb": "graph",
    "1/model.savedmodel/variables/variables.index": "index",
    "1/model.savedmodel/variables/variables.data-00000-of-00001": "0" * 100,
    "1/model.savedmodel/assets/deep/er/vocabulary.txt": "a\nb\n",
    "2/model.savedmodel/saved_model.pb": "graph",
    "2/model.savedmodel/variables/variables.data-00000-of-00001": "1" * 100,
}


# --- what is new ---


def in_place(file: Path, text: str, between: Callable[[], None]) -> None:
    """Written piece by piece, as `cp` and `scp` do."""
    for end in (0, len(text) // 2, len(text)):
        put(file, text[:end])
        between()


def by_temporary_names(file: Path, text: str, between: Callable[[], None]) -> None:
    """Written beside, as `rsync` does."""
    part = file.with_name(f".{file.name}.Xa71B")
    in_place(part, text, between)
    part.rename(file)
    between()


WRITERS = [in_place, by_temporary_names]
Write = Callable[[Path, str, Callable[[], None]], None]


@pytest.mark.parametrize("write", WRITERS)
@given(order=st.permutations(list(MODEL)))
@settings(max_examples=12)
def test_a_model_that_is_copied_slowly(
    tmp_path_factory: pytest.TempPathFactory, write: Write, order: list[str]
) -> None:
    """In whichever order its files come, and with a look after each step."""
    root = tmp_path_factory.mktemp("models")
    put(root / "other" / "model.py")
    scanning = ScanningServer(root)

    def look() -> None:
        scanning.look()
        assert scanning.versions() == {"other": [1]}

    for name in order:
        write(root / "m" / name, MODEL[name], look)
    scanning.look()
    # The latest one, as the configuration says, which may have come last.
    assert scanning.versions() == {"other": [1], "m": [2]}
    assert scanning.last.wanted["m"][2].config.backend == "tensorflow"
    assert not scanning.last.problems
    assert scanning.loads == ["other/1", "m/2"]


def test_a_model_whose_last_version_is_begun_before_its_configuration_comes(tmp_path: Path) -> None:
    """The first version is whole for long, the second one not even a version yet."""
    put(tmp_path / "other" / "model.py")
    scanning = ScanningServer(tmp_path)
    put(tmp_path / "m" / "1" / "model.py")
    for size in range(5):
        put(tmp_path / "m" / "2" / "weights", "x" * size)
        assert scanning.look().unsettled
        assert scanning.versions() == {"other": [1]}
    put(tmp_path / "m" / "2" / "model.py")
    put(tmp_path / "m" / "config.pbtxt", ONE)
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"other": [1], "m": [1]}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("configured", [True, False])
@given(order=st.permutations([name for name in MODEL if name.startswith("2/")]))
def test_a_version_that_is_copied_slowly(
    tmp_path_factory: pytest.TempPathFactory, write: Write, configured: bool, order: list[str]
) -> None:
    root = tmp_path_factory.mktemp("models")
    for name, text in MODEL.items():
        if name.startswith("1/"):
            put(root / "m" / name, text)
    if configured:
        put(root / "m" / "labels.txt")
        put(root / "m" / "config.pbtxt", MODEL["config.pbtxt"])
    scanning = ScanningServer(root)

    def look() -> None:
        scanning.look()
        assert scanning.versions() == {"m": [1]}

    for name in order:
        write(root / "m" / name, MODEL[name], look)
    scanning.look()
    assert scanning.versions() == {"m": [2] if configured else [1, 2]}
    assert scanning.loads == ["m/1", "m/2"]


def test_a_version_of_tensorflow_serving_waits_for_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    scanning = ScanningServer(ModelSettings("m", tmp_path / "m"))
    put(tmp_path / "m" / "1" / "saved_model.pb")
    scanning.look()
    put(tmp_path / "m" / "2" / "saved_model.pb")
    scanning.look()
    assert scanning.versions() == {"m": [1]}
    scanning.look()
    assert scanning.versions() == {"m": [2]}


def test_a_new_model_has_to_stay_as_it_is_for_some_time(tmp_path: Path) -> None:
    put(tmp_path / "other" / "model.py")
    scanning = ScanningServer(tmp_path, settle_seconds=3600)
    put(tmp_path / "m" / "model.py")
    put(tmp_path / "other" / "config.pbtxt", "max_batch_size: 2")
    for _ in range(3):
        assert scanning.look().unsettled
        assert scanning.versions() == {"other": [1]}
        assert scanning.last.wanted["other"][1].config.max_batch_size == 0


# --- in place ---


@pytest.mark.parametrize("write", WRITERS)
@given(order=st.permutations([name for name in MODEL if name.startswith("1/")]))
def test_a_version_that_serves_is_replaced_slowly(
    tmp_path_factory: pytest.TempPathFactory, write: Write, order: list[str]
) -> None:
    root = tmp_path_factory.mktemp("models")
    for name in order:
        put(root / "m" / name, "old")
    scanning = ScanningServer(root)
    before = scanning.last.wanted["m"][1]
    for name in order:
        write(root / "m" / name, f"new {MODEL[name]}", lambda: None)
        scanning.look()
        assert scanning.last.wanted["m"] == {1: before}
        assert scanning.last.unsettled
    scanning.look()
    assert scanning.last.wanted["m"][1].stamp != before.stamp
    scanning.look()
    assert scanning.loads == ["m/1", "m/1"]


def test_a_new_file_that_comes_with_a_change_has_to_be_whole(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    scanning = ScanningServer(root)
    before = scanning.last.wanted["m"][1]
    replace(root / "m" / "1" / "model.py", "reads more.bin")
    for size in range(4):
        put(root / "m" / "1" / "more.bin", "x" * size)
        scanning.look()
        assert scanning.last.wanted["m"][1] == before
    scanning.look()
    assert scanning.last.wanted["m"][1] != before


def test_a_change_that_is_taken_back_is_none(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    scanning = ScanningServer(root)
    file = root / "m" / "1" / "model.py"
    file.rename(kept := root / "kept")
    replace(file, "other")
    scanning.look()
    kept.rename(file)
    for _ in range(3):
        scanning.look()
    assert scanning.loads == ["m/1", "m/2"]


def test_a_version_that_is_taken_away_slowly(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    for name in ("a", "b", "c"):
        put(root / "m" / "2" / name)
    scanning = ScanningServer(root)
    for name in ("a", "b", "c", "model.py"):
        (root / "m" / "2" / name).unlink()
        scanning.look()
    assert scanning.versions() == {"m": [1]}
    assert scanning.loads == ["m/1", "m/2"]
