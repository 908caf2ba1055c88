"""README, pasted from top to bottom into an environment that has nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.doc_pages import ROOT, Reader, blocks_of

SYSTEM_PYTHON = Path("/usr/bin/python3")
NEEDED = ("import ensurepip, sys, venv; assert sys.version_info >= (3, 11, 2)",)
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "tests", "bench", "findings")


def _can_make_environments() -> bool:
    if not SYSTEM_PYTHON.exists():
        return False
    return subprocess.run([SYSTEM_PYTHON, "-c", *NEEDED], capture_output=True, check=False).returncode == 0


@pytest.mark.newest
@pytest.mark.skipif(not _can_make_environments(), reason="needs /usr/bin/python3, 3.11.2 or newer, with venv")
def test_every_block_of_the_readme_in_a_new_environment(tmp_path: Path) -> None:
    folder = tmp_path / "triglot"
    shutil.copytree(ROOT, folder, ignore=SKIPPED)
    reader = Reader(folder, folder / ".venv" / "bin" / "python")
    try:
        for block in blocks_of((folder / "README.md").read_text()):
            try:
                reader.read(block)
            except Exception as error:
                raise AssertionError(f"README.md:{block.line}: {error}") from error
    finally:
        reader.close()
