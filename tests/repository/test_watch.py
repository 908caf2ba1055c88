"""Looking again and again: what is whole, what stays, and what is said about it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.scanning_server import ScanningServer, put
from triglot.model.config import ALL, LATEST, VersionPolicy
from triglot.repository.config.settings import ModelSettings


def test_first_scan_takes_existing_versions(tmp_path: Path) -> None:
    for version in ("1", "2", "3"):
        put(tmp_path / version / "model.py")
    for policy, wanted in ((LATEST, [3]), (VersionPolicy(latest=2), [2, 3]), (ALL, [1, 2, 3])):
        assert ScanningServer(ModelSettings("m", tmp_path, policy)).versions() == {"m": wanted}
    assert ScanningServer(tmp_path).versions() == {tmp_path.name: [1, 2, 3]}


def test_the_first_look_waits_for_nothing(tmp_path: Path) -> None:
    """Whatever the time of day and the interval: differences of such numbers are not exact."""
    put(tmp_path / "1" / "model.py")
    for step in range(1, 200):
        scanning = ScanningServer(ModelSettings("m", tmp_path), settle_seconds=step / 97)
        assert scanning.versions() == {"m": [1]}


def test_a_new_version_is_taken_when_it_is_seen_twice(tmp_path: Path) -> None:
    put(tmp_path / "1" / "model.py")
    scanning = ScanningServer(ModelSettings("m", tmp_path))
    put(tmp_path / "2" / "model.py")
    assert scanning.look().unsettled
    assert scanning.versions() == {"m": [1]}
    assert not scanning.look().unsettled
    assert scanning.versions() == {"m": [2]}


def test_a_version_that_is_written_is_not_taken(tmp_path: Path) -> None:
    put(tmp_path / "1" / "saved_model.pb")
    scanning = ScanningServer(ModelSettings("m", tmp_path))
    put(tmp_path / "2" / "saved_model.pb", "graph")
    for size in range(3):
        put(tmp_path / "2" / "variables" / "data", "x" * size)
        assert scanning.look().unsettled
        assert scanning.versions() == {"m": [1]}
    scanning.look()
    assert scanning.versions() == {"m": [2]}


def test_files_have_to_stay_as_they_are_for_some_time(tmp_path: Path) -> None:
    put(tmp_path / "1" / "model.py")
    scanning = ScanningServer(ModelSettings("m", tmp_path), settle_seconds=3600)
    assert scanning.versions() == {"m": [1]}
    put(tmp_path / "2" / "model.py")
    for _ in range(3):
        assert scanning.look().unsettled
        assert scanning.versions() == {"m": [1]}


def test_a_version_that_failed_is_wanted_with_the_same_files_until_they_change(tmp_path: Path) -> None:
    file = put(tmp_path / "1" / "model.py", "broken")
    scanning = ScanningServer(ModelSettings("m", tmp_path))
    failed = scanning.last.wanted["m"][1]
    for _ in range(3):
        assert scanning.look(loaded=[]).wanted == {"m": {1: failed}}
    put(file, "mended by now")
    assert scanning.look(loaded=[]).unsettled
    assert scanning.last.wanted == {"m": {1: failed}}
    mended = scanning.look(loaded=[]).wanted["m"][1]
    assert (mended.file, mended.stamp != failed.stamp) == (file, True)


def test_a_version_that_serves_is_not_looked_into(tmp_path: Path) -> None:
    file = put(tmp_path / "1" / "model.py")
    scanning = ScanningServer(ModelSettings("m", tmp_path))
    before = scanning.last.wanted
    put(file, "changed")
    put(tmp_path / "1" / "cache", "written by the model")
    for _ in range(3):
        assert not scanning.look().unsettled
        assert scanning.last.wanted == before


def test_other_files_for_a_version_that_serves(tmp_path: Path) -> None:
    put(tmp_path / "1" / "model.onnx")
    scanning = ScanningServer(ModelSettings("m", tmp_path))
    before = scanning.last.wanted
    better = put(tmp_path / "1" / "model.py")
    scanning.look()
    assert scanning.last.wanted == before
    scanning.look()
    assert scanning.last.wanted["m"][1].file == better


@pytest.mark.parametrize("policy", [LATEST, ALL])
def test_versions_that_go(tmp_path: Path, policy: VersionPolicy) -> None:
    put(tmp_path / "1" / "model.py")
    put(tmp_path / "2" / "model.py")
    scanning = ScanningServer(ModelSettings("m", tmp_path, policy))
    shutil.rmtree(tmp_path / "2")
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"m": [1]}
    shutil.rmtree(tmp_path / "1")
    scanning.look()
    assert scanning.versions() == {"m": []}


def test_removed_base_path_keeps_its_versions_and_blocks_no_model(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1" / "model.py")
    put(tmp_path / "b" / "1" / "model.py")
    scanning = ScanningServer(ModelSettings("a", tmp_path / "a"), ModelSettings("b", tmp_path / "b"))
    (tmp_path / "a").rename(tmp_path / "gone")
    put(tmp_path / "b" / "2" / "model.py")
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"a": [1], "b": [2]}
    assert list(scanning.last.problems) == ["a"]
    (tmp_path / "gone").rename(tmp_path / "a")
    assert not scanning.look().problems


def test_a_repository(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path / name / "1" / "model.py")
    scanning = ScanningServer(tmp_path)
    shutil.rmtree(tmp_path / "a")
    put(tmp_path / "b" / "model.py")  # Both kinds of layout: what served is kept.
    put(tmp_path / "d" / "model.py")
    put(tmp_path / "e e" / "model.py")
    scanning.look()
    assert scanning.versions() == {"b": [1], "c": [1]}
    scanning.look()
    assert scanning.versions() == {"b": [1], "c": [1], "d": [1]}


def test_removed_repository(tmp_path: Path) -> None:
    put(tmp_path / "r" / "a" / "1" / "model.py")
    put(tmp_path / "b" / "1" / "model.py")
    # Any way of writing a path is the same path.
    scanning = ScanningServer(Path(os.path.relpath(tmp_path / "b" / ".." / "r")), tmp_path / "b")
    (tmp_path / "r").rename(tmp_path / "gone")
    put(tmp_path / "b" / "2" / "model.py")
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"a": [1], "b": [1, 2]}
    (tmp_path / "r").mkdir()
    scanning.look()
    assert scanning.versions() == {"b": [1, 2]}


def test_model_moves_out_of_a_removed_repository(tmp_path: Path) -> None:
    put(tmp_path / "r" / "a" / "1" / "model.py")
    put(tmp_path / "s" / "b" / "1" / "model.py")
    scanning = ScanningServer(tmp_path / "r", tmp_path / "s")
    (tmp_path / "r").rename(tmp_path / "gone")
    put(tmp_path / "s" / "a" / "2" / "model.py")
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"a": [2], "b": [1]}


def test_a_warning_is_given_once_and_again_when_it_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    put(tmp_path / "1" / "model.py")
    scanning = ScanningServer(ModelSettings("m", tmp_path, VersionPolicy(specific=frozenset({1, 2}))))
    scanning.look()
    missing = f"m: version_policy: version 2 not found in {tmp_path}"
    assert caplog.messages == [missing]
    put(tmp_path / "2" / "model.py")
    scanning.look()
    shutil.rmtree(tmp_path / "2")
    scanning.look()
    assert caplog.messages == [missing], "it may be on its way"
    scanning.look()
    scanning.look()
    assert caplog.messages == [missing, missing]
    tmp_path.rename(tmp_path.with_name("gone"))
    for _ in range(3):
        scanning.look()
    assert caplog.messages[2:] == [f"Could not find base path {tmp_path} for servable m"]
    assert caplog.records[-1].levelname == "ERROR"
    tmp_path.with_name("gone").rename(tmp_path)


def test_base_path_is_removed_during_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as one that is gone, not as one that was emptied: the serving version continues."""
    folder = tmp_path / "m"
    put(folder / "1" / "model.py")
    scanning = ScanningServer(ModelSettings("m", folder))
    listing = Path.iterdir

    def go(path: Path) -> Iterator[Path]:
        entries = list(listing(path))
        if path == folder:
            folder.rename(tmp_path / "away")
        return iter(entries)

    monkeypatch.setattr(Path, "iterdir", go)
    scanning.look()
    assert scanning.versions() == {"m": [1]}
    assert not folder.exists()


def test_what_is_just_being_made_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "other" / "model.py")
    scanning = ScanningServer(tmp_path)
    (tmp_path / "m" / "1").mkdir(parents=True)
    scanning.look()
    put(tmp_path / "m" / "config.pbtxt", "max_batch_size: {")
    scanning.look()
    put(tmp_path / "m" / "config.pbtxt", "max_batch_size: 4")
    scanning.look()
    put(tmp_path / "m" / "1" / "model.py")
    scanning.look()
    scanning.look()
    assert scanning.versions() == {"other": [1], "m": [1]}
    assert caplog.messages == []
    (tmp_path / "n").mkdir()
    for _ in range(3):
        scanning.look()
    assert [message.partition(",")[0] for message in caplog.messages] == [
        f"{tmp_path / 'n'} is skipped: it contains no model"
    ]


def test_error_of_a_requested_model_is_logged_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    scanning = ScanningServer(ModelSettings("m", tmp_path / "gone"), ModelSettings("n", tmp_path / "empty"))
    assert list(scanning.last.problems) == ["m", "n"]
    scanning.look()
    scanning.look()
    logged = [(record.levelname, record.getMessage().partition(",")[0]) for record in caplog.records]
    assert logged == [
        ("ERROR", f"Could not find base path {tmp_path / 'gone'} for servable m"),
        ("WARNING", f"No versions of servable n found under base path {tmp_path / 'empty'}"),
    ]


def test_what_takes_the_place_of_others_is_whole_before_they_go(tmp_path: Path) -> None:
    for version in ("1", "2"):
        put(tmp_path / "m" / version / "model.py")
    config = put(tmp_path / "m" / "config.pbtxt", "version_policy { all {} }")
    scanning = ScanningServer(tmp_path)
    put(config, "version_policy { specific { versions: 7 } }")
    for _ in range(3):
        scanning.look()
        assert scanning.versions() == {"m": [1, 2]}
    for size in range(3):
        put(tmp_path / "m" / "7" / "model.py", "x" * size)
        scanning.look()
        assert scanning.versions() == {"m": [1, 2]}
    scanning.look()
    assert scanning.versions() == {"m": [7]}
