"""Archives of Python environments and models, each unpacked once for all who use it, and kept for the next time.

Strategy: an archive's path, size and time name its folder in the user's cache. Who uses the folder holds a lock on
it, shared; who unpacks or deletes it has the lock alone, so a server that ends half way leaves nothing that is
taken for whole. What was unpacked of an archive that has changed since goes when the next one is unpacked.
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

FOLDER, LOCK, WHOLE = "folder", "lock", "whole"
"""What there is in an archive's place: the folder, its lock, and once it is whole what it was unpacked from."""
_LOOK_SECONDS = 0.1


class GivenUp(Exception):
    """Nobody waits for the folder any more."""


class Unpacked:
    """The folder of an `archive`; it is there until `close`."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def of(cls, archive: Path, finish: Callable[[Path], object], cancelled: Callable[[], bool]) -> Unpacked:
        """Unpack it unless that was done before; `finish` completes a new folder.

        Blocks. Raises `GivenUp`, `OSError`, `TarError`, and what `finish` raises.
        """
        source = _source_of(archive)
        return cls._there(
            "environments", source, lambda folder: _unpack(archive, folder, finish, cancelled), cancelled
        )

    @classmethod
    def made(cls, kind: str, source: str, make: Callable[[Path], object]) -> Unpacked:
        """The folder of this kind that has once been made of this source; `make` fills a new one, which it gets.

        Blocks. Raises `OSError`, and what `make` raises.
        """
        return cls._there(kind, source, partial(_make, make), lambda: False)

    @classmethod
    def _there(
        cls, kind: str, source: str, make: Callable[[Path], object], cancelled: Callable[[], bool]
    ) -> Unpacked:
        home = _home(kind)
        place = home / hashlib.sha256(source.encode()).hexdigest()[:32]
        place.mkdir(exist_ok=True)
        lock = (place / LOCK).open("a+")  # Read and write, as NFS asks for.
        try:
            _wait_for(lock, fcntl.LOCK_SH, cancelled)
            while not (place / WHOLE).exists():
                fcntl.flock(lock, fcntl.LOCK_UN)
                _wait_for(lock, fcntl.LOCK_EX, cancelled)
                if not (place / WHOLE).exists():
                    _sweep(home)
                    make(place / FOLDER)
                    (place / WHOLE).write_text(source)
                # In between somebody may find that the archive has changed.
                fcntl.flock(lock, fcntl.LOCK_UN)
                _wait_for(lock, fcntl.LOCK_SH, cancelled)
        except BaseException:
            lock.close()
            raise
        return cls(place / FOLDER, lock)

    def close(self) -> None:
        """It is not used any more."""
        self._lock.close()


def _source_of(archive: Path) -> str:
    status = archive.stat()
    return json.dumps([str(archive.resolve()), status.st_size, status.st_mtime_ns])


def _home(kind: str) -> Path:
    """Where unpacked ones of this kind lie: this user's alone. Raises `OSError`."""
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = said if said.is_absolute() else Path.home() / ".cache"
        return _own(cache / "triglot" / kind)
    except (OSError, RuntimeError):  # A user without a home, or whose home is not to be written.
        home = Path(tempfile.gettempdir()) / f"triglot-{kind}-{os.geteuid()}"
        if home.is_symlink():  # Anybody may have made it.
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


def _wait_for(lock: IO[str], kind: int, cancelled: Callable[[], bool]) -> None:
    while True:
        if cancelled():
            raise GivenUp
        with suppress(BlockingIOError):
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)  # A lock that is waited for cannot be given up.


def _unpack(archive: Path, folder: Path, finish: Callable[[Path], object], cancelled: Callable[[], bool]) -> None:
    def plain(member: TarInfo, path: str) -> TarInfo | None:
        if cancelled():
            raise GivenUp
        # Root would give files to whoever has their owner's number here.
        return tar_filter(member, path).replace(uid=os.geteuid(), gid=os.getegid(), uname="", gname="", deep=False)

    def unpacked(folder: Path) -> None:
        unpack(archive, folder, keep=plain)
        finish(folder)

    _make(unpacked, folder)


def _make(make: Callable[[Path], object], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # Of who did not come to the end.
    folder.mkdir()
    try:
        make(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sweep(home: Path) -> None:
    """Delete what nobody uses and what is not of any archive as it is now."""
    for place in home.iterdir():
        with suppress(OSError, ValueError), (place / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_current(place / WHOLE):
                (place / WHOLE).unlink(missing_ok=True)
                shutil.rmtree(place / FOLDER, ignore_errors=True)


def _is_current(whole: Path) -> bool:
    """Whether it is whole, and its archive as it was."""
    try:
        source = whole.read_text()
        return source == _source_of(Path(json.loads(source)[0]))
    except (FileNotFoundError, ValueError):  # Of no archive on this machine.
        return False
