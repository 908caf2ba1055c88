"""What the bench has in C++: built once, where there is a compiler."""

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
    """Whether there is a compiler, and that header."""
    if shutil.which(COMPILER) is None:
        return False
    words = [COMPILER, "-std=c++17", "-E", "-x", "c++", "-"]
    done = subprocess.run(words, input=f"#include <{header}>", text=True, capture_output=True, check=False)
    return done.returncode == 0


def compiled(source: Path, flags: Sequence[str]) -> Path:
    """The program, or the library, of a source file; of the same text and flags it is built once."""
    digest = hashlib.sha256("\0".join((source.read_text(), *flags)).encode()).hexdigest()[:16]
    made = KEPT / f"{source.stem}-{digest}"
    if not made.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(".part")
        # What the flags name comes after what needs it.
        words = [COMPILER, "-std=c++17", "-O2", "-o", str(part), str(source), *flags]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{source.name} is not built:\n{done.stderr[-2000:]}")
        part.replace(made)
    return made
