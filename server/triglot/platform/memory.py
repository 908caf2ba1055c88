"""Configures how the C library handles free memory.

glibc returns a large block to the kernel as soon as it is free, and gets the next one page by page, with a fault
each: for large tensors this takes longer than everything else. So glibc is configured to keep free blocks up to a
limit, and the kept memory is returned when the process is idle. Explicit settings and other allocators are
respected.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
LARGEST_KEPT_BLOCK = 32 * 1024 * 1024
"""The maximum that glibc accepts."""
MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Limit on free memory that is kept at the end of the heap."""
MAX_HEAPS = 1
"""No separate heaps for threads: glibc would keep 64 MiB of each, and trims only the end of the first one."""
HEAPS_VARIABLE = "MALLOC_ARENA_MAX"
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
TUNABLES, MALLOC_TUNABLE = "GLIBC_TUNABLES", "glibc.malloc."
_PROBE_BYTES = 1 << 20
REST_SECONDS = 3.0
RESTING_SHARE = 0.05
"""Share of one CPU that a process may use while it counts as idle."""


class _Info(ctypes.Structure):
    """The result of mallinfo2, which glibc has since 2.33."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("mapped", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks")),
        ("used", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("fordblks", "keepcost")),
    )


def keep_memory(environment: Mapping[str, str]) -> bool:
    """Configure glibc to keep large free blocks; return whether it does so.

    Does nothing if variables in `environment` configure glibc, or if another allocator is used.
    """
    set_already = [name for name in VARIABLES if name in environment]
    if MALLOC_TUNABLE in environment.get(TUNABLES, ""):
        set_already.append(TUNABLES)
    if set_already:
        log.debug("malloc is left as it is: %s is set", " and ".join(set_already))
        return False
    library = _glibc()
    if library is None:
        log.debug("malloc is left as it is: it is not glibc's")
        return False
    if HEAPS_VARIABLE not in environment:
        library.mallopt(_M_ARENA_MAX, MAX_HEAPS)
    return bool(
        library.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)
        and library.mallopt(_M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
    )


def trim() -> None:
    """Return free pages to the kernel. Callable on any thread, concurrently with others."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process, by its id; 0 if it has ended, or the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, and `malloc` is its own."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Info
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    except (AttributeError, OSError, ValueError):  # Missing confstr, name or function.
        return None
    # Measured, as the address of `malloc` may be that of a stub in an executable with fixed addresses.
    before = _used(library)
    block = library.malloc(_PROBE_BYTES)
    measured = _used(library) - before
    library.free(block)
    return library if measured >= _PROBE_BYTES // 2 else None


def _used(library: ctypes.CDLL) -> int:
    info = library.mallinfo2()
    used: int = info.mapped + info.used
    return used


async def trim_when_idle(seconds: float = REST_SECONDS) -> None:
    """Until cancelled, calls `trim` whenever the process has worked and then been idle for so long."""
    worked, before = True, time.process_time()
    while True:
        await asyncio.sleep(seconds)
        now = time.process_time()
        rests, before = now - before < RESTING_SHARE * seconds, now
        if rests and worked:
            gc.collect()  # Unreachable objects may hold much: TLS buffers, tensors of failed calls.
            await asyncio.to_thread(trim)
        worked = not rests
