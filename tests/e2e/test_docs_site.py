"""The site of docs/, in a browser: no page is wider than the window, and what is wider than its text scrolls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import docs_site
from tests.e2e.browser import IN_ONE_BROWSER, OVERFLOW, visiting

pytestmark = IN_ONE_BROWSER

WIDTHS = (1280, 390)
HEIGHT = 844
SCHEMES = {"light": "default", "dark": "slate"}
"""What the site calls the two that a browser may ask for."""
CUT = """() => {
    const scrolls = element => element.matches("article *")
        && (["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
    const part = document.createRange();
    const end = node => {
        part.selectNode(node);
        return part.getBoundingClientRect().right;
    };
    const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
    const cut = [];
    while (texts.nextNode()) {
        const text = texts.currentNode;
        const isWide = end(text) > document.documentElement.clientWidth + 1;
        if (isWide && !scrolls(text.parentElement)) cut.push(text.data);
    }
    return cut;
}"""
"""JavaScript: the texts that reach beyond the window, and are in nothing that scrolls."""


async def cut(page: Any, width: int) -> list[str]:
    """What is cut, or makes the page scroll sideways, in a window of this width."""
    await page.set_viewport_size({"width": width, "height": HEIGHT})
    overflow = await page.evaluate(OVERFLOW)
    parts: list[str] = await page.evaluate(CUT)
    return parts if overflow <= 0 else [f"scrolls by {overflow} px", *parts]


async def test_nothing_is_cut(tmp_path: Path) -> None:
    files = sorted(docs_site.built(tmp_path).rglob("index.html"))
    assert len(files) > 50
    found = []
    async with visiting() as visitor:
        page = visitor.page
        for file in files:
            await page.goto(file.as_uri())
            for scheme, name in SCHEMES.items():
                await page.emulate_media(color_scheme=scheme)
                await page.locator(f"body[data-md-color-scheme={name}]").wait_for()
                for width in WIDTHS:
                    found += [
                        f"{file.parent.name}, {scheme}, {width} px: {part}" for part in await cut(page, width)
                    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("style", "parts"), [("overflow: auto", 0), ("overflow: hidden", 1), ("overflow: visible", 2)]
)
async def test_what_is_cut(style: str, parts: int) -> None:
    async with visiting() as visitor:
        await visitor.page.set_content(f"<article><div style='{style}'><pre>{'x' * 1000}</pre></div></article>")
        assert len(await cut(visitor.page, 390)) == parts
