"""Formats tables, and describes the machine and the software."""

import datetime
import os
import platform
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bench.servers import ROOT

CLIENT_BOUND = 0.9


def plain(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join(line(cells).rstrip() for cells in (header, *lines))


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def machine() -> list[str]:
    """Returns lines about the machine and the software of the measurement."""
    packages = ("grpcio", "uvloop", "aiohttp", "numpy", "protobuf", "orjson")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return [
        f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}{_how_built()}, {versions}",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}",
    ]


def _how_built() -> str:
    """Returns how Python was built: without profile-guided optimisation, Python code alone is slower."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return "" if "--enable-optimizations" in arguments else " (built without --enable-optimizations)"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # each run rewrites the benches' results, which do not affect the code
        written = (":!bench/*.md", ":!bench/*.svg", ":!bench/*.txt")
        changed = git("status", "--porcelain", "--", ".", *written)
        return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
