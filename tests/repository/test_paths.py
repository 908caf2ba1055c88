"""What a path may not do: lead out of its repository, by its name or by a symbolic link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository.links_on_disk import link, put
from triglot.core.errors import ModelLoadError
from triglot.repository.scan.paths import below, check_links, check_links_below, inside

# --- names ---


@pytest.mark.parametrize("name", ["labels.txt", "a/b.txt", "./a", "a//b", "..txt", "a..b/...", "%2e%2e", "~", ""])
def test_names_that_stay(name: str) -> None:
    assert inside(Path("/r/m"), name, "key") == Path("/r/m") / name


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "a/..", "/etc/passwd", "//etc", "a\0b"])
def test_names_that_lead_out(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        inside(Path("/r/m"), name, "default_model_filename")
    assert str(caught.value) == f"default_model_filename: expected a path inside /r/m, got {name!r}"


@given(st.lists(st.sampled_from(["..", ".", "a", "", "b c", "…", "\\", "a\n"])), st.booleans())
def test_no_name_leads_out(parts: list[str], absolute: bool) -> None:
    name = "/" * absolute + "/".join(parts)
    try:
        path = inside(Path("/r/m"), name, "key")
    except ModelLoadError:
        return
    assert Path(*path.parts).resolve().is_relative_to("/r/m")


# --- what lies below a folder ---


def names_below(folder: Path, **options: Any) -> set[str]:
    return {str(Path(entry.path).relative_to(folder)) for entry in below(folder, **options)}


def test_what_lies_below_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "a" / "b" / "c" / "file", tmp_path / ".part", tmp_path / ".git" / "HEAD")
    put(tmp_path / "__pycache__" / "a.pyc", tmp_path / "a" / "model.py~", tmp_path / ".model.py.swp")
    put(tmp_path / "venv" / "pyvenv.cfg", tmp_path / "venv" / "lib" / "numpy.py")
    link(tmp_path / "linked", tmp_path / "a")
    link(tmp_path / "loop", "loop")
    link(tmp_path / "up", tmp_path)
    at_top = {"a", ".part", ".git", "venv", "linked", "loop", "up"}
    linked = {"linked/b", *(f"up/{name}" for name in at_top)}
    assert names_below(tmp_path, levels=1) == at_top
    assert names_below(tmp_path, levels=2) == at_top | linked | {"a/b"}
    assert names_below(tmp_path) == at_top | linked | {"a/b", "a/b/c", "a/b/c/file"}


def test_missing_folder(tmp_path: Path) -> None:
    assert names_below(tmp_path / "gone") == set()


def test_a_folder_that_is_very_deep(tmp_path: Path) -> None:
    folders = [tmp_path / ("d/" * depth) for depth in range(1, 1201)]
    for folder in folders:
        folder.mkdir()
    try:
        assert sum(1 for _ in below(tmp_path)) == 1200
    finally:  # What is so deep cannot be removed by recursion.
        for folder in reversed(folders):
            folder.rmdir()


# --- links ---


def test_links_that_stay_and_links_that_lead_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(root / "a" / "file", outside / "file")
    link(root / "in", "a/file")
    link(root / "loop", "loop")
    link(root / "nowhere", "a/missing")
    link(tmp_path / "alias", root)
    for path in (root, root / "a", root / "in", root / "loop", root / "nowhere"):
        check_links(path, root)
        check_links(path, tmp_path / "alias")
    check_links_below(root, root)
    targets: list[Path | str] = [outside / "file", "../../outside", "../../root2", "/", outside / "missing"]
    for number, target in enumerate(targets):
        link(root / "a" / f"out{number}", target)
        with pytest.raises(ModelLoadError, match="a symbolic link leads out"):
            check_links(root / "a" / f"out{number}", root)
    with pytest.raises(ModelLoadError) as caught:
        check_links(root / "a" / "out0", tmp_path / "alias")
    assert str(caught.value) == (
        f"{root / 'a' / 'out0'}: a symbolic link leads out of {tmp_path / 'alias'}, to {outside / 'file'}; "
        "--allow-symlinks, or TRIGLOT_ALLOW_SYMLINKS=true, allows that"
    )
    with pytest.raises(ModelLoadError):
        check_links_below(root, root)
