"""Whether what lies in a version's folder is as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from triglot.model.config import ModelConfig, TensorConfig, WarmUpInput, WarmUpRequest
from triglot.repository.scan.contents import (
    END_BYTES,
    MAX_ENTRIES,
    contents_of,
    end_of,
    folder_contents,
    stamp_of,
)
from triglot.repository.scan.source import ModelFiles


def write(file: Path, text: str, seconds: int) -> None:
    """A file that was written at that time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (seconds, seconds))


def stamp(file: Path, *, single_file: bool = False, config: ModelConfig | None = None) -> int:
    return stamp_of(
        contents_of(ModelFiles("m", 1, "any", file, single_file=single_file, config=config or ModelConfig()))
    )


def test_the_stamp_of_a_version(tmp_path: Path) -> None:
    file = tmp_path / "1" / "saved_model.pb"
    stamps = [stamp(file)]
    deep = tmp_path / "1" / "pipeline" / "unet" / "weights"
    for change in (
        lambda: write(file, "graph", 1),
        lambda: write(file, "longer graph", 1),
        lambda: write(file, "longer graph", 2),
        lambda: write(tmp_path / "1" / "variables" / ".index.part", "", 2),
        lambda: (tmp_path / "1" / "variables" / ".index.part").rename(tmp_path / "1" / "variables" / "index"),
        lambda: write(tmp_path / "1" / "variables" / "index", "weights", 2),
        lambda: write(deep, "half", 2),
        lambda: write(deep, "the whole", 2),
        (tmp_path / "1" / "assets").mkdir,
        lambda: (tmp_path / "1" / "nowhere").symlink_to(tmp_path / "gone"),
        lambda: write(tmp_path / "gone", "", 2),
        lambda: shutil.rmtree(tmp_path / "1" / "pipeline"),
    ):
        change()
        stamps.append(stamp(file))
        assert stamp(file) == stamps[-1]
    assert len(set(stamps)) == len(stamps)


def test_what_does_not_change_the_stamp(tmp_path: Path) -> None:
    file = tmp_path / "1" / "model.py"
    write(file, "", 1)
    (tmp_path / "1" / ".cache").mkdir()
    before = stamp(file)
    write(tmp_path / "1" / "__pycache__" / "model.pyc", "", 2)
    write(tmp_path / "1" / ".model.py.swp", "", 2)
    write(tmp_path / "1" / ".cache" / "compiled", "", 2)
    # The configuration counts by what it says.
    write(tmp_path / "1" / "config.pbtxt", "", 2)
    write(tmp_path / "2" / "model.py", "", 2)
    assert stamp(file) == before


def test_the_stamp_of_a_file_on_its_own(tmp_path: Path) -> None:
    file = tmp_path / "resnet.onnx"
    write(file, "", 1)
    before = stamp(file, single_file=True)
    write(tmp_path / "other.onnx", "", 2)
    assert stamp(file, single_file=True) == before
    write(file, "more", 1)
    assert stamp(file, single_file=True) != before


def test_the_stamp_covers_the_version_s_whole_folder(tmp_path: Path) -> None:
    file = tmp_path / "1" / "model.savedmodel" / "saved_model.pb"
    write(file, "", 1)
    files = ModelFiles("m", 1, "tensorflow", file, folder=tmp_path / "1")
    before = stamp_of(contents_of(files))
    write(tmp_path / "1" / "vocabulary.txt", "", 1)
    assert stamp_of(contents_of(files)) != before


def test_the_stamp_covers_what_the_configuration_names(tmp_path: Path) -> None:
    file = tmp_path / "1" / "model.py"
    labels, data = tmp_path / "labels.txt", tmp_path / "warmup" / "one"
    for path in (file, labels, data):
        write(path, "", 1)
    named = ModelConfig(
        outputs=[TensorConfig("y", "INT32", [1], label_file=labels), TensorConfig("z", "INT32", [1])],
        warm_up=[WarmUpRequest("a", {"x": WarmUpInput("INT32", [1], file=data), "u": WarmUpInput("INT32", [1])})],
    )
    stamps = [stamp(file, config=named)]
    write(labels, "cat", 1)
    stamps.append(stamp(file, config=named))
    write(data, "0000", 1)
    stamps.append(stamp(file, config=named))
    write(tmp_path / "README.md", "", 1)
    assert len(set(stamps)) == 3
    assert stamp(file, config=named) == stamps[-1]


def test_a_folder_that_holds_everything_is_not_looked_through(tmp_path: Path) -> None:
    for number in range(MAX_ENTRIES + 10):
        (tmp_path / str(number)).touch()
    assert len(folder_contents(tmp_path)) == MAX_ENTRIES
    # What the configuration names counts in any case.
    named = ModelConfig(outputs=[TensorConfig("y", "INT32", [1], label_file=tmp_path / "labels.txt")])
    write(tmp_path / "labels.txt", "cat", 1)
    files = ModelFiles("m", 1, "any", tmp_path / "model.py", config=named)
    assert contents_of(files)[str(tmp_path / "labels.txt")] == (3, 10**9)


@pytest.mark.parametrize("size", [0, 1, END_BYTES - 1, END_BYTES, END_BYTES + 1, 3 * END_BYTES])
def test_the_end_of_a_file(tmp_path: Path, size: int) -> None:
    text = os.urandom(3 * END_BYTES)
    (tmp_path / "file").write_bytes(text)
    assert end_of(str(tmp_path / "file"), size) == text[:size][-END_BYTES:]


def test_what_has_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "pipe"):
        assert end_of(str(path), 5) is None
