"""The site that `make docs` builds: every link in it leads to a page, a file or a heading of it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests import docs_site
from tests.docs.doc_pages import ROOT


@dataclass
class Page(HTMLParser):
    """The links of a page, and the names of its parts."""

    links: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See the base class."""
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.names.add(value)


def read(file: Path) -> Page:
    page = Page()
    page.feed(file.read_text())
    return page


def dead_links(site: Path) -> Iterator[str]:
    """The page and the link, of each that leads nowhere in the site; those to other sites are omitted."""
    pages = {file: read(file) for file in site.rglob("*.html") if file.name != "404.html"}
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir():
                target /= "index.html"
            lost = not target.is_relative_to(site) or not target.is_file()
            if lost or (parts.fragment and unquote(parts.fragment) not in pages[target].names):
                yield f"{file.relative_to(site)}: {link}"


def pages_of(navigation: list[Any]) -> Iterator[str]:
    """The pages of a list of these and of groups, each a table of one such list by its title."""
    for entry in navigation:
        if isinstance(entry, str):
            yield entry
        else:
            (group,) = entry.values()
            yield from pages_of(group)


def test_every_page_is_in_the_navigation() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text())
    docs = ROOT / "docs"
    assert sorted(pages_of(settings["project"]["nav"])) == sorted(
        page.relative_to(docs).as_posix() for page in docs.rglob("*.md")
    )


@pytest.mark.newest
def test_every_link_of_the_site_leads_somewhere(tmp_path: Path) -> None:
    site = docs_site.built(tmp_path)
    assert (site / "architecture" / "index.html").is_file()
    assert not (dead := list(dead_links(site))), "\n".join(dead)


@pytest.mark.parametrize(
    "link", ["../gone/", "#gone", "other.html#gone", "../../README.md", "picture.svg", "other.html?x#gone"]
)
def test_what_is_dead(link: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    site = tmp_path / "site"
    (site / "page").mkdir(parents=True)
    (site / "page" / "other.html").write_text("<h1 id=there>There</h1>")
    live = '<a href="#here" id="here"></a> <a href="other.html#there"></a> <a href="./"></a> <a href="//x/y"></a>'
    (site / "page" / "index.html").write_text(f'{live} <a href="{link}"></a>')
    assert list(dead_links(site)) == [f"page/index.html: {link}"]
