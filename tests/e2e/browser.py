"""Opens pages in a real browser: Debian's Chromium, controlled by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.process import SECONDS

playwright_api = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=SECONDS * 1000)

REFUSAL = re.compile(r"Failed to load resource: the server responded with a status of 40[13] ")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""JavaScript: pixels by which the page is wider than the window."""


def chromium() -> str:
    """Return the path of the machine's Chromium; skips the test if there is none.

    The headless shell has no windows, which take most of the CPU time of a test.
    """
    for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium found: pages are not tested")


IN_ONE_BROWSER = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("browser")]
"""Pytest marks for a file whose tests use `visiting`: they share a browser, which is slow to start."""
_browsers: list[Any] = []


@asynccontextmanager
async def launched() -> AsyncIterator[None]:
    """Run the browser that `visiting` uses, until the block ends."""
    path = chromium()
    async with playwright_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        _browsers.append(browser)
        try:
            yield
        finally:
            _browsers.remove(browser)
            await browser.close()


class BrowserPage:
    """A browser's page, with the URLs that it requested (`asked`) and the browser's messages (`complaints`)."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    async def open(self, url: str, token: str = "") -> None:
        """Open the monitor page, enter the token if one is given, and wait until the page shows live data."""
        await self.page.goto(url)
        if token:
            await self.give(token)
        await expect(self.page.locator("#connection")).to_have_text("live", timeout=SECONDS * 1000)

    async def give(self, token: str) -> None:
        """Enter a token into the page's form."""
        await self.page.get_by_role("textbox", name="Token").fill(token)
        await self.page.get_by_role("button", name="Use token").click()

    def other_complaints(self) -> list[str]:
        """Return the browser's messages, without those about responses with status 401 and 403."""
        return [complaint for complaint in self.complaints if not REFUSAL.search(complaint)]

    def field(self, model: str, field: str) -> Any:
        """Return the locator of a cell in the table of models."""
        return self.page.locator(f"#models tr[data-model={model}] [data-field={field}]")


@asynccontextmanager
async def visiting(**options: Any) -> AsyncIterator[BrowserPage]:
    """Yield an empty page in a new browser context, without cookies or other state."""
    context = await _browsers[-1].new_context(**options)
    try:
        yield BrowserPage(await context.new_page())
    finally:
        await context.close()
