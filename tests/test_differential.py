"""The differential fuzzer finds what differs between two builds; the plain and the compiled one do not differ."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import BUILD_VARIABLE

SERVER = Path(__file__).resolve().parents[1] / "server"


def fuzz(folder: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.differential", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def changed_copy(folder: Path, file: str, before: str, after: str) -> Path:
    """A copy of the package with another text in a file."""
    shutil.copytree(SERVER / "triglot", folder / "triglot")
    path = folder / "triglot" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return folder


def test_another_answer_is_reported_with_its_input(tmp_path: Path) -> None:
    before, after = "HTTP version", "HTTP's version"
    copy = changed_copy(tmp_path, "transports/http1/requests.py", before, after)
    done = fuzz(copy, "--only", "http1", "--seconds", "3")
    assert done.returncode == 1
    assert "http1, seed 0, block 0: input " in done.stdout
    assert before in done.stdout
    assert after in done.stdout


def test_a_crash_is_reported_with_its_input(tmp_path: Path) -> None:
    copy = changed_copy(
        tmp_path,
        "protocols/kserve/codec.py",
        "counts += [(len(tensor.shape), MAX_DIMS)",
        '__import__("os").abort()\n    counts += [(len(tensor.shape), MAX_DIMS)',
    )
    done = fuzz(copy, "--only", "kserve", "--seconds", "3")
    assert done.returncode == 1
    assert "exit codes: [None, -6]" in done.stdout


def test_a_folder_without_the_package_is_an_error(tmp_path: Path) -> None:
    done = fuzz(tmp_path, "--seconds", "1")
    assert done.returncode == 2
    assert f"expected a folder with the package triglot, got '{tmp_path}'" in done.stderr


@pytest.mark.skipif(BUILD_VARIABLE not in os.environ, reason="for the compiled build")
def test_the_compiled_build_answers_as_the_plain_one() -> None:
    done = fuzz(os.environ[BUILD_VARIABLE], "--seconds", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert " inputs, 0 differences" in done.stdout
