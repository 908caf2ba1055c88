"""How threads, and the event loop, wake each other."""

from __future__ import annotations

import os
import sys

_ONE = (1).to_bytes(8, sys.byteorder)


class Doorbell:
    """Rung by anybody, awaited by one thread, or by a loop that watches the file.

    Neither who rings nor who waits holds the interpreter's lock meanwhile, as they do with `threading`'s locks and
    `call_soon_threadsafe`: who is woken on the same core goes on at once, rather than wait for that lock in turn.
    """

    __slots__ = ("_rings", "file")

    def __init__(self) -> None:
        self.file = self._rings = -1
        if hasattr(os, "eventfd"):
            self.file = self._rings = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self.file, self._rings = os.pipe()

    def ring(self) -> None:
        """Have who waits go on, now or when it comes to wait."""
        os.write(self._rings, _ONE)

    def wait(self) -> None:
        """Block until it has been rung since the last time."""
        os.read(self.file, len(_ONE))

    def close(self) -> None:
        """Nobody rings or waits any more."""
        files, self.file, self._rings = {self.file, self._rings}, -1, -1
        for file in files - {-1}:
            os.close(file)

    def __del__(self) -> None:
        self.close()
