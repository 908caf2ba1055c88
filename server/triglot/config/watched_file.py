"""The access file on the disk: read when another file has taken its place, and never while it is being written.

Strategy: what an editor or a full disk leaves of a file is often valid TOML, with fewer limits than the whole. A
file that was renamed to the path is complete; one that was written there is, once it is left alone. A change in
place is refused: nothing tells when it is complete. The file is held open, so that no other gets its inode.
Workers get the file from their supervisor, so that one that starts reads no half of a change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from triglot.config.options import ConfigError

CHECK_SECONDS = 0.5
"""Interval of checks of the file."""
SETTLE_SECONDS = 1.0
"""How long a new file must stay as it is, unless it was renamed after it was written."""


State = tuple[str, Sequence[int], Sequence[int]]
"""A file as JSON values: its content in Latin-1, device and inode, time of its content and size."""


class WatchedFile:
    """The file at `path`, with its `content`, or as `known` to another process.

    Raise `ConfigError` if it cannot be read.
    """

    def __init__(self, path: Path, known: State | None = None) -> None:
        self._path = path
        self._held = -1
        self._inode = self._signature = (0, 0)
        self.content = b""
        if known is None:
            self._read()
        else:
            text, (device, inode), (changed, size) = known
            self.content, self._inode, self._signature = text.encode("latin-1"), (device, inode), (changed, size)

    @property
    def state(self) -> State:
        """The file as it is known here."""
        return self.content.decode("latin-1"), self._inode, self._signature

    def replaced(self) -> bool:
        """Read the file if it was replaced; returns whether it was.

        Raise `ConfigError`, also for a change in place.
        """
        try:
            now = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from None
        if _inode(now) != self._inode:
            # Renaming changes the time of the inode, but not of its content.
            was_renamed = now.st_ctime_ns > now.st_mtime_ns
            settled = time.time_ns() - now.st_mtime_ns >= SETTLE_SECONDS * 1e9
            return (was_renamed or settled) and self._read()
        if _signature(now) != self._signature:
            raise ConfigError(
                f"access: {self._path} was changed in place, which may be half of a change: write another file, "
                "and rename it (mv) to this one"
            )
        return False

    def _read(self) -> bool:
        """Read the file; returns False, and changes nothing, if it is written meanwhile."""
        try:
            held = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            before = os.fstat(held)
            content = b""
            while more := os.read(held, 2**20):
                content += more
        except OSError as error:
            raise self._unreadable(error) from None
        if self.content and _signature(os.fstat(held)) != _signature(before):
            os.close(held)
            return False
        self.close()
        self._held, self.content = held, content
        self._inode, self._signature = _inode(before), _signature(before)
        return True

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"access: cannot read {self._path}: {error.strerror}")

    def close(self) -> None:
        """Let go of the file."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    __del__ = close


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _signature(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size
