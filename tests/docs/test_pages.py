"""What README and docs say can be done, done; and where their links lead."""

from __future__ import annotations

import argparse
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.doc_pages import (
    EXAMPLES,
    PAGES,
    ROOT,
    Block,
    Reader,
    anchors_of,
    blocks_below,
    blocks_of,
    links_of,
)
from triglot.cli.main import command_line

OWN_PATH = re.compile(r"`((?:bench|codegen|deploy|docs|examples|protos|server|tests)/[\w./-]+)`")
CALL = re.compile(r"^curl .*http|^grpcurl |^triglot infer |[cC]lient\(|Stub\(", re.MULTILINE)
MADE_BY_MAKE = re.compile(r"`make ([a-z-]+)")
FIRST_MODEL: tuple[Callable[[Block], bool], ...] = (
    lambda block: block.language == "python",
    lambda block: block.text.startswith("triglot serve "),
    lambda block: "curl " in block.text or "infer(" in block.text,
    lambda block: block.language == "text",
)
"""The model, its server, a call, and what that prints, in order."""
OTHER_OPTIONS = {
    "--cert",
    "--enable-feature",
    "--extra-index-url",
    "--find-links",
    "--from",
    "--gzip-local",
    "--model-repository",
    "--pip-args",
    "--strict",
    "--vectors-path",
}
"""Of curl, pip, gcloud and others, and the one that a page adds."""
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


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_every_page_is_listed(name: str) -> None:
    """But for the parts of contracts, which have a page that lists them."""
    page, docs = ROOT / name, ROOT / "docs"
    listed = {(page.parent / target.partition("#")[0]).resolve() for target in links_of(page.read_text())}
    pages = {file.resolve() for file in (*docs.glob("*.md"), *(docs / "migrating").glob("*.md"))}
    assert pages - listed <= {docs / "index.md"}


@pytest.mark.parametrize("name", NAMES)
def test_files_and_targets_exist(name: str) -> None:
    """Those of the project that a page names without a link."""
    text = (ROOT / name).read_text()
    assert [path for path in OWN_PATH.findall(text) if not (ROOT / path).exists()] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(MADE_BY_MAKE.findall(text)) <= set(targets)


def test_first_models_have_all_lines_and_commands() -> None:
    """From the model to what a call prints, on the pages that the table has."""
    page = ROOT / "docs" / "first_model.md"
    targets = re.findall(r"^\|[^|]*\| \[[^\]]*\]\(([^)]*)\)", page.read_text(), re.MULTILINE)
    assert len(targets) >= 7
    for target in targets:
        path, _, anchor = target.partition("#")
        blocks = blocks_below((page.parent / path if path else page).read_text(), anchor)
        assert not [block for block in blocks if block.not_run], target
        rest = iter(blocks)
        assert all(any(map(is_next, rest)) for is_next in FIRST_MODEL), target


def test_options_exist() -> None:
    """Those that pages name in their text; a page for another server's users names that server's, too."""
    known = {*_flags(command_line()), *OTHER_OPTIONS}
    unknown = {
        (name, option)
        for name in NAMES
        if not name.lower().endswith("changelog.md") and not {"contracts", "migrating"} & {*Path(name).parts}
        for code in re.findall(r"`([^`\n]*)`", (ROOT / name).read_text())
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
        if option not in known
    }
    assert unknown == set()


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a command and of all below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


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
