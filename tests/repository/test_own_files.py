"""What a model writes into its own folder does not have it loaded again and again, and hides no other changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.repository.scanning_server import ScanningServer, put
from tests.repository.scripted_loads import Loads, managing
from tests.repository.scripted_loads import put as put_version
from tests.waiting import until
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.repository.scan.file_snapshots import MAX_WAITING_SCANS
from triglot.repository.scan.scanner import Scanner
from triglot.repository.scan.source import ModelFiles

LOOKS = 10
"""Enough for every change to settle, and for what it leads to, several times over."""


def look_often(scanning: ScanningServer) -> list[str]:
    """The loads so far."""
    for _ in range(LOOKS):
        scanning.look()
    return scanning.loads


def writes(name: str) -> Callable[[ModelFiles], None]:
    """A file in the version's folder that is another one after each load, of another size or another time."""
    numbers = count(1)

    def write(files: ModelFiles) -> None:
        number = next(numbers)
        file = put(files.file.parent / name, f"{number} compiled " * (number % 3))
        os.utime(file, (number, number))

    return write


def appends(name: str) -> Callable[[ModelFiles], None]:
    def append(files: ModelFiles) -> None:
        with (files.file.parent / name).open("a") as file:
            file.write("a call\n")

    return append


# --- while it loads ---


@pytest.mark.parametrize("name", ["cache.bin", "cache/compiled.bin", "deep/er/cache.bin"])
@pytest.mark.parametrize("before", [True, False])
def test_a_cache_that_is_written_at_each_load(tmp_path: Path, name: str, before: bool) -> None:
    """Whether an earlier server has left one or not."""
    put(tmp_path / "m" / "1" / "model.py")
    if before:
        put(tmp_path / "m" / "1" / name, "of an earlier server")
    scanning = ScanningServer(tmp_path, on_load=writes(name))
    assert look_often(scanning) == ["m/1"] * (2 if before else 1)
    # Whatever else has changed has it loaded, and loaded once more at most.
    put(tmp_path / "m" / "1" / "model.py", "better")
    loads = list(look_often(scanning))
    assert loads == ["m/1"] * (3 if before else len(loads))
    assert len(loads) <= 3
    put(tmp_path / "m" / "1" / "model.py", "better still")
    assert look_often(scanning) == [*loads, "m/1"]
    put(tmp_path / "m" / "1" / "weights.bin", "beside")
    put(tmp_path / "m" / "1" / "model.py", "the best one")
    assert look_often(scanning) == [*loads, "m/1", "m/1"]
    put(tmp_path / "m" / "1" / "weights.bin", "of the same model")
    assert look_often(scanning) == [*loads, "m/1", "m/1", "m/1"]


def test_ignored_files_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    put(tmp_path / "m" / "1" / "model.py")
    cache = put(tmp_path / "m" / "1" / "cache", "of an earlier server")
    look_often(ScanningServer(tmp_path, on_load=writes("cache")))
    assert caplog.messages == [
        f"m version 1: {cache} appears to be written by the model itself; its changes no longer trigger a reload"
    ]


def test_a_cache_that_is_written_at_the_end_of_a_long_load(tmp_path: Path) -> None:
    """Scans continue meanwhile, and take no part of it for a change."""
    put(tmp_path / "m" / "1" / "model.py")
    put(tmp_path / "m" / "1" / "cache", "of an earlier server")
    scanning = ScanningServer(tmp_path)

    def load_for_long() -> None:
        loads = len(scanning.loads)
        for size in range(LOOKS):
            scanning.look(busy=["m"])
            scanning.look(busy=["m"])
            put(tmp_path / "m" / "1" / "cache", f"{loads} {size}" * size)
        scanning.look(busy=["m"])
        assert len(scanning.loads) == loads

    load_for_long()
    scanning.look()
    assert scanning.loads == ["m/1", "m/1"]
    load_for_long()
    assert look_often(scanning) == ["m/1", "m/1"]
    # What is changed while it loads is seen as soon as it has loaded.
    put(tmp_path / "m" / "1" / "model.py", "better")
    scanning.look(busy=["m"])
    scanning.look(busy=["m"])
    scanning.look()
    assert scanning.loads == ["m/1", "m/1", "m/1"]


@pytest.mark.parametrize("write", [writes("crash.txt"), appends("crash.txt")])
def test_a_version_that_fails_and_writes_why(tmp_path: Path, write: Callable[[ModelFiles], None]) -> None:
    put(tmp_path / "good" / "1" / "model.py")
    put(tmp_path / "m" / "1" / "model.py")
    scanning = ScanningServer(tmp_path, on_load=lambda files: write(files) if files.name == "m" else None)
    scanning.broken.add("m version 1")
    assert look_often(scanning) == ["good/1", "m/1", "m/1"]
    # What was missing is a reason.
    put(tmp_path / "m" / "1" / "weights.bin")
    assert look_often(scanning) == ["good/1", "m/1", "m/1", "m/1"]
    scanning.broken.clear()
    put(tmp_path / "m" / "1" / "model.py", "mended")
    assert look_often(scanning) == ["good/1", *["m/1"] * 4]


def test_code_that_is_saved_during_each_load_is_loaded_each_time(tmp_path: Path) -> None:
    """A developer is quick; what is code counts for ever."""
    put(tmp_path / "m" / "model.py")
    put(tmp_path / "m" / "helper.py")
    scanning = ScanningServer(tmp_path / "m", on_load=writes("helper.py"))
    for number in range(1, 6):
        scanning.look()
        scanning.look()
        assert len(scanning.loads) == number + 1


# --- while it serves ---


@pytest.mark.parametrize("before", ["", "a line of an earlier server\n", "x" * 10_000])
def test_a_log_that_is_appended_to_on_each_call(tmp_path: Path, before: str) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    if before:
        put(tmp_path / "m" / "1" / "calls.txt", before)
    scanning = ScanningServer(tmp_path, on_load=appends("calls.txt"))
    call = appends("calls.txt")
    for _ in range(LOOKS):
        # Some looks see it grow, some do not.
        call(scanning.last.wanted["m"][1])
        scanning.look()
        call(scanning.last.wanted["m"][1])
        scanning.look()
        scanning.look()
    assert scanning.loads == ["m/1"]
    # It never settles, and does not keep a change from being taken.
    put(tmp_path / "m" / "1" / "model.py", "better")
    for _ in range(2 if before else MAX_WAITING_SCANS + 2):
        call(scanning.last.wanted["m"][1])
        scanning.look()
    assert scanning.loads == ["m/1", "m/1"]
    for change in ("better still", "the best one"):
        loads = len(scanning.loads)
        put(tmp_path / "m" / "1" / "model.py", change)
        for _ in range(LOOKS):
            call(scanning.last.wanted["m"][1])
            scanning.look()
        assert len(scanning.loads) == loads + 1


def test_a_file_for_each_call(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    scanning = ScanningServer(tmp_path)
    for number in range(LOOKS):
        put(tmp_path / "m" / "1" / f"answer-{number}.png", "pixels")
        scanning.look()
        scanning.look()
    assert scanning.loads == ["m/1"]


@pytest.mark.parametrize("change", ["replaced", "emptied", "removed", "longer, of another beginning"])
def test_changed_data_is_loaded_each_time(tmp_path: Path, change: str) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    weights = put(tmp_path / "m" / "1" / "weights.bin", "0" * 100)
    scanning = ScanningServer(tmp_path)
    loads = 1
    for number in range(2, 5):
        if change == "removed":
            weights.unlink(missing_ok=True)
        else:
            size = {"emptied": 0, "replaced": 100}.get(change, 100 * number)
            put(weights, str(number) * size)
            os.utime(weights, (number, number))
        look_often(scanning)
        loads += change != "removed" or number == 2
        assert len(scanning.loads) == loads


def test_what_is_no_python_model_appends_nothing(tmp_path: Path) -> None:
    """Users do, to the weights of an ONNX model, say."""
    put(tmp_path / "m" / "1" / "model.onnx", "graph")
    weights = put(tmp_path / "m" / "1" / "weights.data", "0" * 100)
    scanning = ScanningServer(tmp_path)
    put(weights, "0" * 200)
    assert look_often(scanning) == ["m/1", "m/1"]


def test_a_hidden_folder_is_the_model_s_own(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    put(tmp_path / "m" / "1" / ".state" / "database", "")
    scanning = ScanningServer(tmp_path)
    for number in range(LOOKS):
        put(tmp_path / "m" / "1" / ".state" / "database", "x" * number)
        scanning.look()
        scanning.look()
    assert scanning.loads == ["m/1"]


def test_who_asks_for_a_model_has_all_of_it_loaded(tmp_path: Path) -> None:
    """Whatever was learnt about its files."""
    file = put(tmp_path / "m" / "1" / "model.py")
    put(tmp_path / "m" / "1" / "cache", "of an earlier server")
    scanning = ScanningServer(tmp_path, on_load=writes("cache"))
    look_often(scanning)
    before = scanning.last.wanted["m"][1]
    put(file.parent / "new.bin")
    look = scanning.watch.scan([tmp_path], scanning.last.wanted, [before], lambda _: True)
    assert look.wanted["m"][1].stamp != before.stamp


def test_what_is_forgotten(tmp_path: Path) -> None:
    """A model that goes and comes back is a new one."""
    put(tmp_path / "m" / "1" / "model.py")
    put(tmp_path / "other" / "1" / "model.py")
    watch = Scanner(0.0)
    first = watch.scan([tmp_path], {}, [], lambda _: True)
    (tmp_path / "m").rename(tmp_path / ".m")
    forgotten = watch.scan([tmp_path], first.wanted, [])
    assert list(forgotten.wanted) == ["other"]
    forgotten = watch.scan([tmp_path], forgotten.wanted, [])
    (tmp_path / ".m").rename(tmp_path / "m")
    back = watch.scan([tmp_path], forgotten.wanted, [])
    assert (list(back.wanted), back.unsettled) == (["other"], True)
    back = watch.scan([tmp_path], back.wanted, [])
    assert list(back.wanted) == ["m", "other"]


# --- through the manager ---


class Writing(Loads):
    """The model `m` writes a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.write = writes("cache")

    def __call__(self, backend: str, file: Path, config: ModelConfig) -> Model:
        if file.parent.parent.name == "m":
            self.write(ModelFiles("m", 1, backend, file))
        return super().__call__(backend, file, config)


async def test_models_that_write_into_their_folders_are_left_alone(tmp_path: Path) -> None:
    """Loaded by a manager, on threads."""
    for name in ("m", "n"):
        put_version(tmp_path / name / "1")
    put(tmp_path / "m" / "1" / "cache", "of an earlier server")

    load = Writing()
    async with managing(tmp_path, load=load) as manager:
        for _ in range(LOOKS):
            await manager.refresh()
            await until(lambda: not manager.reconciler.workers)
        assert load.begun == ["m/1", "n/1", "m/1"]
        (tmp_path / "n" / "1" / "calls.txt").write_text("one")
        os.utime(tmp_path / "n" / "1" / "model.py", (1, 1))
        for _ in range(LOOKS):
            await manager.refresh()
            await until(lambda: not manager.reconciler.workers)
        assert load.begun == ["m/1", "n/1", "m/1", "n/1"]
