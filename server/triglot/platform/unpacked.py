"""Archives of Python environments and models, each unpacked once for all its users, and cached for later ones.

Strategy: an archive's path, size and time name its folder in the user's cache. Users of the folder hold a shared
lock on it; to unpack or delete it takes the exclusive lock, and a folder counts as complete only once that is
recorded, so a server that ends while it unpacks leaves nothing that others use. Unused folders of archives that
have changed since are deleted when another archive is unpacked.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from triglot.platform.archives import TarInfo, tar_filter, unpack

FOLDER, LOCK, COMPLETE = "folder", "lock", "whole"
"""Names in an archive's place: the folder, its lock, and a file with its source once the folder is complete."""
_LOOK_SECONDS = 0.1
"""Seconds between attempts to get a lock."""


class LoadCancelled(Exception):
    """Loading was cancelled."""


class Unpacked:
    """An unpacked folder, which is kept until `close`. `lock` is its lock file, locked."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def of(cls, archive: Path, finish: Callable[[Path], object], cancelled: Callable[[], bool]) -> Unpacked:
        """Return the folder of an environment's archive, which is unpacked unless the cache has it.

        `finish` completes a new folder, which it gets. Blocks. Raise `LoadCancelled` once `cancelled()` is true,
        `OSError`, `TarError`, and what `finish` raises.
        """

        def make(folder: Path) -> None:
            unpack(archive, folder, keep=partial(_plain, cancelled))
            finish(folder)

        return cls.made("environments", source_of(archive), make, cancelled)

    @classmethod
    def made(
        cls,
        kind: str,
        source: str,
        make: Callable[[Path], object],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Unpacked:
        """Return the folder of this kind and source, which is made unless the cache has it.

        `kind` names a folder of the cache, and `source` identifies the contents. `make` fills a new folder, which
        it gets. Blocks. Raise `LoadCancelled` once `cancelled` returns true, `OSError`, and what `make` raises.
        """
        home = _home(kind)
        place = home / hashlib.sha256(source.encode()).hexdigest()[:32]
        place.mkdir(exist_ok=True)
        lock = (place / LOCK).open("a+")  # For reading and writing, as NFS requires for locks.
        try:
            _wait_for(lock, fcntl.LOCK_SH, cancelled)
            while not (place / COMPLETE).exists():
                fcntl.flock(lock, fcntl.LOCK_UN)
                # Who has made the folder meanwhile uses it, and keeps its shared lock.
                if _wait_for(lock, fcntl.LOCK_EX, cancelled, unless=(place / COMPLETE).exists):
                    if not (place / COMPLETE).exists():
                        _sweep(home)
                        _make(make, place / FOLDER)
                        (place / COMPLETE).write_text(source)
                    # Between the two locks another process may find the archive changed, and delete the folder.
                    fcntl.flock(lock, fcntl.LOCK_UN)
                _wait_for(lock, fcntl.LOCK_SH, cancelled)
        except BaseException:
            lock.close()
            raise
        return cls(place / FOLDER, lock)

    def close(self) -> None:
        """Release the folder, which others may then delete."""
        self._lock.close()


def source_of(archive: Path) -> str:
    status = archive.stat()
    return json.dumps([str(archive.resolve()), status.st_size, status.st_mtime_ns])


def _home(kind: str) -> Path:
    """Return the cache's folder of this kind, which only this user can write to. Raise `OSError`."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = configured if configured.is_absolute() else Path.home() / ".cache"
        return _own(cache / "triglot" / kind)
    except (OSError, RuntimeError):  # A user without a home, or whose home is not writable.
        home = Path(tempfile.gettempdir()) / f"triglot-{kind}-{os.geteuid()}"
        if home.is_symlink():  # Any user may have made it.
            raise PermissionError(f"{home}: expected a folder, got a link") from None
        return _own(home)


def _own(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = folder.resolve()
    status = folder.stat()
    if status.st_uid != os.geteuid() or not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder}: expected a folder that this user owns and can write to")
    if status.st_mode & 0o022:
        folder.chmod(0o700)
    return folder


def _wait_for(
    lock: IO[str], kind: int, cancelled: Callable[[], bool], unless: Callable[[], bool] = lambda: False
) -> bool:
    """Wait for the lock; returns False if `unless()` is true before. Raise `LoadCancelled`."""
    while True:
        if cancelled():
            raise LoadCancelled
        with suppress(BlockingIOError):
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return True
        if unless():
            return False
        time.sleep(_LOOK_SECONDS)  # A blocking `flock` could not be cancelled.


def _plain(cancelled: Callable[[], bool], member: TarInfo, path: str) -> TarInfo | None:
    if cancelled():
        raise LoadCancelled
    # As root, extraction would set the owners of the archive, whose user ids belong to other users here.
    return tar_filter(member, path).replace(uid=os.geteuid(), gid=os.getegid(), uname="", gname="", deep=False)


def _make(make: Callable[[Path], object], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # Left by a process that ended while it made the folder.
    folder.mkdir()
    try:
        make(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sweep(home: Path) -> None:
    """Delete the folders that are not in use and whose archive has changed, or is not on this machine."""
    for place in home.iterdir():
        with suppress(OSError, ValueError), (place / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_current(place / COMPLETE):
                (place / COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(place / FOLDER, ignore_errors=True)


def _is_current(marker: Path) -> bool:
    """Return whether a folder is complete, and its archive unchanged. `marker`: the file with its source."""
    try:
        source = marker.read_text()
        return source == source_of(Path(json.loads(source)[0]))
    except (FileNotFoundError, ValueError):  # Incomplete, or not made of an archive on this machine.
        return False
