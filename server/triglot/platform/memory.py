"""What the C library does with memory that is free.

Strategy: glibc gives a large block back to the kernel as soon as it is free, and gets the next one page by page,
each a fault: with large tensors that takes longer than all else. So it is told to keep them, up to a bound, and
what it has kept is given back when the process rests. Who has told it otherwise, or uses another allocator, is
right.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
LARGEST_KEPT_BLOCK = 32 * 1024 * 1024
"""The most that glibc takes."""
MOST_KEPT_BYTES = 256 * 1024 * 1024
"""At the end of the heap."""
HEAPS = 1
"""Threads have none of their own: glibc would keep 64 MiB of each, and trims only the end of the first one."""
HEAPS_VARIABLE = "MALLOC_ARENA_MAX"
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
TUNABLES, MALLOC_TUNABLE = "GLIBC_TUNABLES", "glibc.malloc."
_PROBE_BYTES = 1 << 20
REST_SECONDS = 10.0
RESTING_SHARE = 0.05
"""Of a CPU, what a process that rests may use."""


class _Info(ctypes.Structure):
    """mallinfo2's, which glibc has from 2.33 on."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("mapped", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks")),
        ("used", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("fordblks", "keepcost")),
    )


def keep_memory(environment: Mapping[str, str]) -> bool:
    """Have glibc keep large blocks that are free; whether it does so from now on.

    Not where variables in `environment` say how it is to do its work, or memory comes from another allocator.
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
        library.mallopt(_M_ARENA_MAX, HEAPS)
    return bool(
        library.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)
        and library.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT_BYTES)
    )


def give_back() -> None:
    """Give what is free back to the kernel, as far as pages are. Any thread may do so, while others go on."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc, and `malloc` its own."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Info
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    except (AttributeError, OSError, ValueError):  # No confstr, no such name in it, or no such function.
        return None
    # Not where `malloc` is: an executable that is linked to fixed addresses has a stub of its own.
    before = _used(library)
    block = library.malloc(_PROBE_BYTES)
    counted = _used(library) - before
    library.free(block)
    return library if counted >= _PROBE_BYTES // 2 else None


def _used(library: ctypes.CDLL) -> int:
    info = library.mallinfo2()
    used: int = info.mapped + info.used
    return used


async def give_back_at_rest(seconds: float = REST_SECONDS) -> None:
    """Do so, until cancelled, each time that the process has worked and then rested for so long."""
    worked, before = True, time.process_time()
    while True:
        await asyncio.sleep(seconds)
        now = time.process_time()
        rests, before = now - before < RESTING_SHARE * seconds, now
        if rests and worked:
            gc.collect()  # What waits for it may hold much: buffers of TLS, tensors of a call that failed.
            await asyncio.to_thread(give_back)
        worked = not rests
