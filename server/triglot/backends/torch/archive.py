"""Determines the kind of a PyTorch file: each is a zip archive, and its members differ.

A pickle can run arbitrary code, so none is loaded except for those of tensors, which torch has a safe reader for.
TorchScript has none. torch.export falls back to pickles, so these are checked before it reads the file.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from triglot.core.errors import ModelLoadError
from triglot.platform.archives import ArchiveTooLarge, check_zip

EXPECTED = (
    "expected a TorchScript program (torch.jit.save), an exported program (torch.export.save) or an "
    "AOTInductor package"
)
_AHEAD_OF_TIME = "data/aotinductor/"
_OLD_EXPORT = "serialized_exported_program.json"
_OLD_PICKLES = ("serialized_state_dict.json", "serialized_constants.json")


class Kind(enum.Enum):
    """The function that a program was saved by."""

    SCRIPT = "torch.jit.save"
    EXPORTED = "torch.export.save"
    COMPILED = "torch._inductor.aoti_compile_and_package"


def kind_of(file: Path) -> Kind:
    """Return the kind of program in the file.

    Raise `ModelLoadError`, which says what the file is instead; also for more than can be read of few bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            check_zip(file, archive)  # `check_pickles` and torch read whole members.
            members = {_inner(name) for name in archive.namelist()}
    except ArchiveTooLarge as error:
        raise ModelLoadError(f"{file}: {error}") from None
    except zipfile.BadZipFile:
        with file.open("rb") as stream:
            pickled = stream.read(1) == pickle.PROTO
        what = "a pickle, as torch.save wrote before PyTorch 1.6" if pickled else "not a PyTorch archive"
        raise ModelLoadError(f"{file}: this is {what}; {EXPECTED}") from None
    compiled = {name.split("/")[2] for name in members if name.startswith(_AHEAD_OF_TIME)}
    models = (name.removeprefix("models/") for name in members if name.startswith("models/"))
    programs = {name.removesuffix(".json") for name in models}
    for found, what in ((compiled, "compiled"), (programs, "exported")):
        if found and found != {"model"}:
            names = ", ".join(sorted(found))
            raise ModelLoadError(f"{file}: expected one {what} program, named model, got {names}")
    if compiled:
        return Kind.COMPILED
    if programs or _OLD_EXPORT in members:
        return Kind.EXPORTED
    if "constants.pkl" in members:
        return Kind.SCRIPT
    what = "a state dict or pickled module (torch.save)" if "data.pkl" in members else "some other zip archive"
    raise ModelLoadError(f"{file}: this is {what}; {EXPECTED}")


def check_pickles(file: Path) -> None:
    """Raise `ModelLoadError` if a pickle in an exported program contains anything but tensors."""
    with zipfile.ZipFile(file) as archive:
        names = {_inner(name): name for name in archive.namelist()}
        for member in _pickles(archive, names):
            if member in names and not _holds_tensors(archive.read(names[member])):
                raise ModelLoadError(
                    f"{file}: {member} is a pickle of objects other than tensors, which could run any code when "
                    f"loaded; expected constants and example inputs that are tensors"
                )


def _pickles(archive: zipfile.ZipFile, names: dict[str, str]) -> Iterator[str]:
    """Yield the members that `torch.export.load` unpickles."""
    for member, name in names.items():
        if member.endswith(".pt") or member in _OLD_PICKLES:
            yield member
        elif member.endswith("_config.json"):
            folder = member.rpartition("/")[0]
            for entry in _entries(archive.read(name)):
                path = str(entry.get("path_name"))
                if entry.get("use_pickle") and not path.startswith("custom_obj_"):
                    yield f"{folder}/{path}"


def _entries(text: bytes) -> Collection[Any]:
    """Return the descriptions of the tensors in a folder."""
    config = json.loads(text).get("config")
    return config.values() if isinstance(config, dict) else ()


def _holds_tensors(data: bytes) -> bool:
    try:
        if data:
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        return False
    return True


def _inner(name: str) -> str:
    """Return a member's name without the top folder, which is named after the original file."""
    return name.partition("/")[2] or name
