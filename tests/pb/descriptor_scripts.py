"""The scripts descriptors_*.py, run in the environment of a client."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests" / "e2e" / "clients"


def run(python: str | Path, script: str, *arguments: str) -> str:
    """What the script prints; it must succeed."""
    command = [str(python), str(CLIENTS / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "server")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dump(python: str | Path, *modules: str) -> dict[str, str]:
    """What the modules declare, each message, field, enum value and method in one line."""
    texts: dict[str, str] = json.loads(run(python, "descriptors_dump.py", *modules))
    return texts
