"""What README and docs say can be done, done; and where their links lead."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from doc_pages import EXAMPLES, PAGES, ROOT, Reader, anchors_of, blocks_of, links_of

OWN_PATH = re.compile(r"`((?:bench|codegen|deploy|docs|examples|protos|server|tests)/[\w./-]+)`")
CALL = re.compile(r"^curl .*http|^grpcurl |^triglot infer |[cC]lient\(|Stub\(", re.MULTILINE)
MADE_BY_MAKE = re.compile(r"`make ([a-z-]+)")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


# Its servers and scripts run with the newest libraries whatever these tests run with.
@pytest.mark.newest
@pytest.mark.parametrize("name", NAMES)
def test_every_block(name: str, tmp_path: Path) -> None:
    if EXAMPLES in (ROOT / name).parent.parents:
        shutil.copytree((ROOT / name).parent, tmp_path, dirs_exist_ok=True)
    reader = Reader(tmp_path)
    try:
        for block in blocks_of((ROOT / name).read_text()):
            try:
                reader.read(block)
            except Exception as error:
                raise AssertionError(f"{name}:{block.line}: {error}") from error
    finally:
        reader.close()


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in links_of(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name}: {target}: no such file"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file.read_text()), f"{name}: {target}: no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_files_and_targets_exist(name: str) -> None:
    """Those of the project that a page names without a link."""
    text = (ROOT / name).read_text()
    assert [path for path in OWN_PATH.findall(text) if not (ROOT / path).exists()] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(MADE_BY_MAKE.findall(text)) <= set(targets)


def test_calls_are_shown_on_one_page_each() -> None:
    """Those of clients, with the same words; another page has a link to it."""
    pages: dict[str, set[str]] = defaultdict(set)
    for name in NAMES:
        for block in blocks_of((ROOT / name).read_text()):
            if block.language in ("sh", "python") and not block.title:
                # A call, and where the next one begins.
                for call in re.split(r"^(?=curl |grpcurl |triglot infer )", block.text, flags=re.MULTILINE):
                    if CALL.search(call):
                        pages[" ".join(call.split())].add(name)
    assert pages
    assert {call: sorted(names) for call, names in pages.items() if len(names) > 1} == {}


def test_new_protocol_takes_150_lines_and_changes_no_file() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    blocks = blocks_of(text[: text.index("## An option")])
    assert [block for block in blocks if block.language == "diff"] == []
    files = {block.title: len(block.text.splitlines()) for block in blocks if block.title.startswith("vectors.")}
    assert files.keys() == {"vectors.proto", "vectors.py"}
    assert sum(files.values()) <= 150, files


def test_pictures_are_small() -> None:
    sizes = {file.name: file.stat().st_size for file in (ROOT / "docs").rglob("*.png")}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 150_000} == {}
