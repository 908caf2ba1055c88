"""Compiles the bench's C++ sources, once, if there is a compiler."""

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.servers import ROOT
from bench.tally import BenchError

COMPILER = "g++"
KEPT = ROOT / ".venv" / "bench"


def can_compile(header: str = "cstdint") -> bool:
    """Return whether there is a compiler, and it finds this header."""
    if shutil.which(COMPILER) is None:
        return False
    words = [COMPILER, "-std=c++17", "-E", "-x", "c++", "-"]
    done = subprocess.run(words, input=f"#include <{header}>", text=True, capture_output=True, check=False)
    return done.returncode == 0


def compiled(source: Path, flags: Sequence[str]) -> Path:
    """Return the path of the program or library of a source file; built once for the same text and flags."""
    digest = hashlib.sha256("\0".join((source.read_text(), *flags)).encode()).hexdigest()[:16]
    made = KEPT / f"{source.stem}-{digest}"
    if not made.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(".part")
        # Libraries, which the flags name, must follow the source that needs them.
        words = [COMPILER, "-std=c++17", "-O2", "-o", str(part), str(source), *flags]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{source.name} is not built:\n{done.stderr[-2000:]}")
        part.replace(made)
    return made
