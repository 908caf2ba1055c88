"""Formats tables, and describes the machine and the software."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.servers import ROOT

CLIENT_BOUND = 0.9
PACKAGES = ("grpcio", "uvloop", "aiohttp", "numpy", "protobuf", "orjson")
_BUILD = """
import importlib.metadata as metadata, json, platform, sys, sysconfig

print(json.dumps({
    "version": platform.python_version(),
    "folder": sys.base_prefix,
    "arguments": sysconfig.get_config_var("CONFIG_ARGS") or "",
    "flags": sysconfig.get_config_var("PY_CFLAGS") or "",
    "packages": {name: metadata.version(name) for name in sys.argv[1:]},
}))
"""
"""Prints how an interpreter was built, and the versions of packages."""
DEBIAN_PYTHON = "/usr"


def plain(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join(line(cells).rstrip() for cells in (header, *lines))


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def machine() -> list[str]:
    """Return lines about the machine and the software of the measurement."""
    return [
        f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        interpreter(sys.executable),
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}",
    ]


def interpreter(python: str) -> str:
    """Return which Python it is, how it was built, and the packages of its environment."""
    done = subprocess.run([python, "-c", _BUILD, *PACKAGES], capture_output=True, text=True, check=True)
    build = json.loads(done.stdout)
    packages = ", ".join(f"{name} {version}" for name, version in build["packages"].items())
    return f"Python {build['version']} ({how_built(build)}), {packages}"


def how_built(build: Mapping[str, Any], debian: bool = Path("/etc/debian_version").exists()) -> str:
    """Return how Python was built, from what sysconfig knows: without a profile, Python code alone is slower.

    Debian's Python is built with a profile, but its sysconfig does not have the flags (changelog of python3.8,
    3.8.0~b2-3 and 3.8.0~b3-1, which later versions carry on).
    """
    levels = [flag for flag in build["flags"].split() if flag.startswith("-O")]
    level = f", {levels[-1]}" if levels else ""  # The last one counts.
    if "--enable-optimizations" in build["arguments"]:
        return f"optimised: --enable-optimizations{level}"
    if debian and build["folder"] == DEBIAN_PYTHON:
        return f"optimised: Debian's, with a profile{level}"
    return f"not optimised: without --enable-optimizations{level}"


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
