"""A model's files on a node: made once for all its instances there, and removed when they are not needed."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

import pytest

from triglot.platform import unpacked
from triglot.platform.unpacked import Unpacked

SECONDS = 20


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


def test_several_find_nothing_and_one_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it to be closed by the one that uses it."""
    together, wait_for = threading.Barrier(3), unpacked._wait_for

    def wait_for_all(lock: Any, kind: int, *arguments: Any, **more: Any) -> bool:
        got = wait_for(lock, kind, *arguments, **more)
        if kind == fcntl.LOCK_SH and not made:
            together.wait(SECONDS)
        return got

    monkeypatch.setattr(unpacked, "_wait_for", wait_for_all)
    made: list[str] = []
    with ThreadPoolExecutor(3) as threads:
        users = [threads.submit(Unpacked.made, "models", "files a", writer(made, "a")) for _ in range(3)]
        try:
            wait(users, SECONDS, FIRST_EXCEPTION)
            assert [user.done() for user in users] == [True] * 3
        finally:
            for user in as_completed(users):
                user.result().close()
    assert made == ["a"]


def test_other_files_replace_unused_ones() -> None:
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
