"""The version is written once, the changelog begins with it, and the classifiers name Pythons that were tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import triglot

ROOT = Path(__file__).resolve().parents[1]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0].split(" - ")[0] == triglot.__version__


def test_the_classifiers_name_the_pythons_that_the_wheel_was_tried_on() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = page.partition("<!-- pythons: begin -->")[2].partition("<!-- pythons: end -->")[0]
    tried = re.findall(r"^\| (3\.\d+)\.\d+, .* calls succeeded \|$", table, re.MULTILINE)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)]
    assert tried == named
