"""A model's files on a node: made once for all its instances there, and gone when nobody needs them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from triglot.executors.process.unpacking import Unpacked


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def writer(made: list[str], text: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        made.append(text)
        (folder / "weights").write_text(text)

    return make


def test_instances_share_what_the_first_has_made() -> None:
    made: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        users = list(threads.map(lambda _: Unpacked.made("models", "files a", writer(made, "a")), range(4)))
    assert made == ["a"]
    assert len({user.folder for user in users}) == 1
    assert (users[0].folder / "weights").read_text() == "a"
    for user in users:
        user.close()


def test_other_files_replace_what_nobody_uses() -> None:
    made: list[str] = []
    used = Unpacked.made("models", "files used", writer(made, "used"))
    unused = Unpacked.made("models", "files unused", writer(made, "unused"))
    unused.close()
    with pytest.raises(OSError, match="no space"):
        Unpacked.made("models", "files large", _fail)
    other = Unpacked.made("models", "files other", writer(made, "other"))
    assert used.folder.exists()
    assert not unused.folder.exists()
    assert (other.folder / "weights").read_text() == "other"
    again = Unpacked.made("models", "files unused", writer(made, "again"))
    assert (again.folder / "weights").read_text() == "again"
    for user in (used, other, again):
        user.close()


def _fail(folder: Path) -> None:
    (folder / "half").touch()
    raise OSError("no space left on device")
