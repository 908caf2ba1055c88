"""The site that `make docs` builds of docs/."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests import environments

ROOT = Path(__file__).resolve().parents[1]
BUILD_SECONDS = 120


def built(folder: Path) -> Path:
    """Build the site in `folder`, which is empty; return the site's own folder."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    build = [str(environments.python("docs")), "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
