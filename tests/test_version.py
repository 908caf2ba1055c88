"""The version is written once, and the changelog begins with it."""

from __future__ import annotations

import re
from pathlib import Path

import triglot

ROOT = Path(__file__).resolve().parents[1]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0].split(" - ")[0] == triglot.__version__
