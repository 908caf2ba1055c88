"""Takes the pictures of the monitor page that docs/monitor.md shows, of a server of the demo models under load.

    python codegen/pictures.py

Chromium has to be installed. Pictures differ from run to run: they are made anew when the page looks another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import Page, async_playwright

import triglot
from triglot.run import DEMO

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
LOAD_SECONDS = 20
FLOWER = {"sepal_length": 6.3, "sepal_width": 2.5, "petal_length": 4.9, "petal_width": 1.5}
CALLS = (
    ("/v2/models/iris/predict", FLOWER),
    ("/v1/models/iris:predict", {"instances": [FLOWER]}),
    ("/grps/v1/infer/predict", {"model": "identity-1", "ndarray": [1.5]}),
)


async def keep_calling(url: str) -> None:
    """Call some models, more and less often by turns."""
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        while True:
            for path, body in CALLS:
                for _ in range(1 + int(time.monotonic()) % 4):
                    async with session.post(path, data=json.dumps(body)) as response:
                        await response.read()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def under_load(url: str) -> AsyncIterator[None]:
    """Other clients call models meanwhile."""
    calling = asyncio.create_task(keep_calling(url))
    try:
        yield
    finally:
        calling.cancel()


async def open_page(page: Page, url: str) -> None:
    """The page with its first numbers."""
    await page.goto(url)
    await page.get_by_text("live", exact=True).wait_for()


async def try_a_model(page: Page) -> None:
    """The answer to a call is shown."""
    await page.get_by_role("combobox", name="Model", exact=True).select_option("storyteller")
    field = page.get_by_label("prompt: text", exact=True)
    await field.fill("Alice was")
    await field.press("Control+Enter")
    await page.get_by_text("10 answers in").wait_for()


async def save(taken: Any, name: str) -> None:
    """A picture, which must not be large."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / name
    await taken.screenshot(path=file)
    size = file.stat().st_size
    print(f"{file.relative_to(ROOT)}: {size} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{file.relative_to(ROOT)} has {size} bytes, expected {MOST_BYTES} at most")


async def take() -> None:
    """All of them."""
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None
    )
    if chromium is None:
        raise SystemExit("chromium is missing; on Debian: apt install chromium")
    config = triglot.Config(grpc_port=0, rest_port=0, drain_delay=0, grace=0)
    async with triglot.Server([DEMO], config) as server, async_playwright() as playwright:
        url = f"http://127.0.0.1:{server.rest_port}/"
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1200, "height": 800})
        async with under_load(url):
            await asyncio.sleep(LOAD_SECONDS)
            await open_page(page, url)
            await save(page, "monitor.png")
        await try_a_model(page)
        await page.locator("#model-details").evaluate("node => node.scrollIntoView()")
        await save(page, "try_it.png")
        phone = await browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        await open_page(phone, url)
        await try_a_model(phone)
        await phone.locator("#model-details").evaluate("node => node.scrollIntoView()")
        await save(phone, "phone.png")
        await browser.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(take()))
