"""Files that hold exported programs, and other archives of PyTorch's."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.torch_files import Pair, Program, export, fp32, lists, load, refused
from triglot.platform.archives import FREE_BYTES

A, B = torch.zeros(1), torch.ones(1)
WANTED = (
    "expected a TorchScript program (torch.jit.save), an exported program (torch.export.save) or an "
    "AOTInductor package"
)


@pytest.mark.parametrize("name", ["model.pt", "program", "other.pt2"])
def test_a_file_of_another_name(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = load(export(tmp_path / name, Pair(), A, B))
    assert lists(model.infer({"a": fp32(3), "b": fp32(1)})) == {"OUTPUT__0": [2]}
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_programs_that_cannot_be_served(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    for function, text in (
        (lambda _, x: x.to(torch.float8_e4m3fn), "'OUTPUT__0' is torch.float8_e4m3fn; expected one of BOOL, "),
        (lambda _, x: (x + 1, 3), "one of its results is int; expected tensors"),
    ):
        found = refused(export(file, Program(function), A))
        assert found.startswith(f"cannot load the exported program: {text}")
    export(
        file, Program(lambda _, x: (x + 1, x.shape[0])), torch.ones(4), dims={"x": {0: torch.export.Dim("rows")}}
    )
    assert "is SymIntArgument; expected tensors and constants" in refused(file)


def rewritten(file: Path, change: Any) -> Path:
    """The archive with each member's name and bytes as `change` gives them; None leaves it out."""
    with zipfile.ZipFile(file) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            if (changed := change(name, data)) is not None:
                archive.writestr(*changed)
    return file


class Marking:
    """Pickled, it makes a file of its name when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_of_other_objects_are_not_loaded(tmp_path: Path, zipped: bool) -> None:
    mark, example = tmp_path / "mark", tmp_path / "example"
    torch.save((Marking(mark), {}), example, _use_new_zipfile_serialization=zipped)
    file = export(tmp_path / "model.pt2", Pair(), A, B)
    member = "data/sample_inputs/model.pt"
    rewritten(file, lambda name, data: (name, example.read_bytes() if name.endswith(member) else data))
    assert refused(file).startswith(
        f"{member} is a pickle of objects other than tensors, which could run any code when"
    )
    assert not mark.exists()
    # It would have been made.
    torch.load(example, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("member", ["weight_0", "opaque_obj_0"])
def test_pickled_weights_are_looked_at(tmp_path: Path, member: str) -> None:
    mark = tmp_path / "mark"
    file = export(tmp_path / "model.pt2", torch.nn.Linear(1, 1), B)

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        if name.endswith("weights/model_weights_config.json"):
            data = data.replace(b'"use_pickle": false', b'"use_pickle": true').replace(
                b"weight_0", member.encode()
            )
        if name.endswith("/weight_0"):
            return name.replace("weight_0", member), pickle.dumps(Marking(mark), 2)
        return name, data

    assert refused(rewritten(file, change)).startswith(f"data/weights/{member} is a pickle of objects other than")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "models/model.json",
            "data/aotinductor/other/x.so",
            "expected one compiled program, named model, got other",
        ),
        ("models/model.json", "models/other.json", "expected one exported program, named model, got other"),
        ("models/model.json", "some/model.json", f"this is some other zip archive; {WANTED}"),
    ],
)
def test_other_archives(tmp_path: Path, old: str, new: str, text: str) -> None:
    file = export(tmp_path / "model.pt2", Pair(), A, B)
    assert refused(rewritten(file, lambda name, data: (name.replace(old, new), data))) == text


def test_few_bytes_that_stand_for_many_are_not_read(tmp_path: Path) -> None:
    file = export(tmp_path / "model.pt2", Pair(), A, B)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/constants/zeros.pt", bytes(2 * FREE_BYTES))
    assert "unpacks to more than" in refused(file)


def test_a_broken_program(tmp_path: Path) -> None:
    file = export(tmp_path / "model.pt2", torch.nn.Linear(1, 1), B)
    rewritten(file, lambda name, data: (name, data[:20] if name.endswith("models/model.json") else data))
    assert refused(file)
    export(file, torch.nn.Linear(1, 1), B)
    rewritten(file, lambda name, data: None if name.endswith("weight_0") else (name, data))
    assert refused(file).startswith("cannot load the exported program: ")
