"""The pages for those who read them with other means: on a phone, dark, by keyboard, with a screen reader."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import triglot
from tests.e2e.browser import IN_ONE_BROWSER, OVERFLOW, BrowserPage, expect, visiting
from tests.e2e.monitor_load import BROKEN_MODEL, BROKEN_TEXT, MODEL, served

pytestmark = IN_ONE_BROWSER
axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="axe is not installed")

FOCUSED = "document.activeElement.id || document.activeElement.tagName"
FORM_IS_FIRST = "Boolean(document.querySelector('#model-details ~ #chart-section'))"
DEVICES = [
    pytest.param({"viewport": {"width": width, "height": 844}, "color_scheme": scheme}, id=f"{width}-{scheme}")
    for width in (1280, 390)
    for scheme in ("light", "dark")
]


@pytest_asyncio.fixture(loop_scope="module")
async def server(tmp_path: Path) -> AsyncIterator[triglot.Server]:
    """Two models that answer, and one that cannot be loaded."""
    async with served(tmp_path) as server:
        yield server


@asynccontextmanager
async def opened(server: triglot.Server, path: str = "", **options: Any) -> AsyncIterator[BrowserPage]:
    """The monitor page, with live data."""
    async with visiting(**options) as visitor:
        await visitor.open(f"http://127.0.0.1:{server.rest_port}/{path}")
        yield visitor
        assert visitor.complaints == []


async def findings(page: Any) -> list[tuple[str, list[str]]]:
    """What axe finds: the rule, and the elements."""
    results = await axe.Axe().run(page)
    assert len(results.response["passes"]) > 10, "axe has looked at nothing"
    return [(found["id"], [node["html"] for node in found["nodes"]]) for found in results.response["violations"]]


@pytest.mark.parametrize("device", DEVICES)
async def test_axe_finds_nothing(server: triglot.Server, device: dict[str, Any]) -> None:
    async with opened(server, f"#model={MODEL}", **device) as visitor:
        page = visitor.page
        await page.locator("#run").click()
        await expect(page.locator("#answer .output")).to_have_count(1)
        for summary in ("#config summary", "#statistics summary", "#traffic summary"):
            await page.locator(summary).click()
        await page.locator("#metrics button").first.click()
        assert await findings(page) == []
        await page.locator("#model-name").select_option(BROKEN_MODEL)
        await expect(page.locator("#versions")).to_contain_text(BROKEN_TEXT)
        assert await findings(page) == []
        assert await page.evaluate(OVERFLOW) == 0
        await page.get_by_role("link", name="API").click()
        operation = page.locator(f"#post_v2_models_{MODEL}_infer")
        await operation.locator("summary").click()
        await expect(operation.get_by_label("curl")).to_be_visible()
        assert await findings(page) == []
        assert await page.evaluate(OVERFLOW) == 0


async def test_the_links_at_the_top_lead_to_the_models_the_form_and_the_api(server: triglot.Server) -> None:
    async with opened(server) as visitor:
        page, keys = visitor.page, visitor.page.keyboard
        await keys.press("Tab")
        await keys.press("Tab")
        await keys.press("Enter")
        await expect(page.locator("#model-details")).to_be_focused()
        await keys.press("Tab")
        assert await page.evaluate(FOCUSED) == "model-name"
        await page.get_by_role("link", name="Models").click()
        await expect(page.locator("#models-title")).to_be_in_viewport()
        await page.get_by_role("link", name="API").click()
        await expect(page.locator("#state")).to_have_text(re.compile("operations$"))
        await page.get_by_role("link", name="Try it").first.click()
        await expect(page.locator("#model-details")).to_be_focused()


async def test_the_address_names_the_model(server: triglot.Server) -> None:
    async with opened(server, "#model=twice") as visitor:
        page = visitor.page
        name, version = (page.get_by_role("combobox", name=name, exact=True) for name in ("Model", "Version"))
        await expect(name).to_have_value("twice")
        await name.select_option(MODEL)
        await expect(page).to_have_url(re.compile(f"#model={MODEL}$"))
        await version.select_option("1")
        await expect(page).to_have_url(re.compile(f"#model={MODEL}&version=1$"))
        await page.reload()
        await expect(version).to_have_value("1")
        await page.evaluate("location.hash = '#model=twice'")
        await expect(name).to_have_value("twice")
        await expect(version).to_have_value("")
        await expect(page.locator("#try:not([inert])")).to_be_visible()


async def test_a_server_that_is_not_ready_says_why(server: triglot.Server) -> None:
    async with opened(server) as visitor:
        await expect(visitor.page.locator("#ready")).to_have_text(re.compile(f"^not ready: {BROKEN_MODEL} "))
        await expect(visitor.page.locator("#ready")).to_contain_text(BROKEN_TEXT)


async def test_the_form_is_before_the_charts_until_a_call(server: triglot.Server) -> None:
    async with opened(server) as visitor:
        page = visitor.page
        await page.locator("#model-name").focus()
        assert await page.evaluate(FORM_IS_FIRST)
        # Ctrl+Enter runs from wherever on the card.
        await page.keyboard.press("Control+Enter")
        await expect(page.locator("#answer .output")).to_have_count(1)
        await page.reload()
        await expect(page.locator("#connection")).to_have_text("live")
        assert not await page.evaluate(FORM_IS_FIRST)
