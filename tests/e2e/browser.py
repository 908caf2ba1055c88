"""A page in a real browser: Debian's Chromium, by Playwright."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from process import SECONDS

playwright_api = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=SECONDS * 1000)

T = TypeVar("T")
REFUSAL = re.compile(r"Failed to load resource: the server responded with a status of 40[13] ")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels of a page that stand beside the window."""


def chromium() -> str:
    """The path of a Chromium of this machine; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium found: pages are not tested")


IN_ONE_BROWSER = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("browser")]
"""Marks of a file whose tests use `visiting`: a browser takes longer to start than most of them to run."""
_browsers: list[Any] = []


@asynccontextmanager
async def launched() -> AsyncIterator[None]:
    """The browser of `visiting`, until the block ends."""
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
    """A browser's page, what it asked for and what it complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    async def open(self, url: str, token: str = "") -> None:
        """Go there, give the token that is asked for, and wait for the first numbers."""
        await self.page.goto(url)
        if token:
            await self.give(token)
        await expect(self.page.locator("#connection")).to_have_text("live", timeout=SECONDS * 1000)

    async def give(self, token: str) -> None:
        """Into the form that asks for one."""
        await self.page.get_by_role("textbox", name="Token").fill(token)
        await self.page.get_by_role("button", name="Use token").click()

    def other_complaints(self) -> list[str]:
        """All but those that the browser has of every refusal."""
        return [one for one in self.complaints if not REFUSAL.search(one)]

    def field(self, model: str, field: str) -> Any:
        """A cell of the table of models."""
        return self.page.locator(f"#models tr[data-model={model}] [data-field={field}]")


@asynccontextmanager
async def visiting(**options: Any) -> AsyncIterator[BrowserPage]:
    """An empty page of the browser, for somebody of whom it knows nothing."""
    context = await _browsers[-1].new_context(**options)
    try:
        yield BrowserPage(await context.new_page())
    finally:
        await context.close()


async def eventually(ask: Callable[[], Awaitable[T]], expected: T) -> None:
    """Ask until this is the answer."""
    deadline = time.monotonic() + SECONDS
    while (answer := await ask()) != expected:
        assert time.monotonic() < deadline, f"expected {expected}, got {answer}"
